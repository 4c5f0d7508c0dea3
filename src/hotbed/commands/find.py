"""Find the best items of users by exported towers: ``hotbed find``."""

from __future__ import annotations

import time

from jsonargparse import ArgumentParser, Namespace

from hotbed.commands.arguments import add_json, console, write_json
from hotbed.locations import local


def add_arguments(parser: ArgumentParser) -> None:
    """Add the towers, the users and the file to make."""
    parser.usage = "hotbed find DIR USERS.parquet --out FILE.parquet [options]"
    parser.add_argument("towers", type=str, help="What hotbed export RUN DIR --towers wrote.")
    parser.add_argument("users", type=str, help="Parquet file with the columns of the user's tower, a row each.")
    parser.add_argument("--out", type=str, required=True, help="Parquet file to make: a row of items for each row.")
    parser.add_argument("--k", type=int, default=10, help="Items for each user.")
    parser.add_argument("--keep", type=str, nargs="+", default=[], help="Columns to copy in front of the items.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Write the items, with progress, and say what was done."""
    from hotbed.train.find import find
    from hotbed.train.report import StageProgress

    out, start = local("--out", parsed.out), time.perf_counter()
    with StageProgress(console(stderr=True)) as progress:
        written = find(
            local("DIR", parsed.towers),
            local("USERS", parsed.users),
            out,
            k=parsed.k,
            keep=parsed.keep,
            progress=lambda done, total: progress("find", done, total),
        )
    seconds = time.perf_counter() - start
    console().print(f"{out}: {written.k:,} items for each of {written.rows:,} rows", soft_wrap=True, highlight=False)
    write_json(parsed.json, {"out": str(out), "rows": written.rows, "k": written.k, "seconds": seconds})
