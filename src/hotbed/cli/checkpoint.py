"""Inspect, verify and convert checkpoints: ``hotbed checkpoint inspect | verify | convert | compact | changes``."""

from __future__ import annotations

import hashlib
import json
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from hotbed.cli.arguments import Command, Parser, add_json, add_trust, console, write_json
from hotbed.errors import RecipeError
from hotbed.files import read_text
from hotbed.locations import local

Origin = Literal["hotbed", "nvidia_dlrm", "torchrec", "facebook_dlrm", "embedding_bag", "dcp"]
Form = Literal["hotbed", "safetensors", "torch", "dcp"]


def add_arguments(parser: Parser) -> None:
    """Add the commands."""
    parser.usage = "hotbed checkpoint COMMAND …"
    parser.add_commands("action", {name: command for name, (command, _) in COMMANDS.items()})


def run(parsed: Namespace) -> None:
    """Run one of them."""
    COMMANDS[parsed.action][1](parsed)


def add_inspect(parser: Parser) -> None:
    """Arguments of ``hotbed checkpoint inspect``."""
    parser.add_argument("path", help="Checkpoint, or a run's directory; a path or a URI.")
    parser.add_argument(
        "--hash", action="store_true", help="Hash all values, which are read; equal for any plan with equal bits."
    )
    add_json(parser)


def inspect_checkpoint(parsed: Namespace) -> None:
    """Show what a checkpoint's manifest says."""
    from hotbed.checkpoint import find_checkpoint, read_manifest
    from hotbed.cli.inspect import describe_manifest, print_description

    place = find_checkpoint(parsed.path)
    description = describe_manifest(place, read_manifest(place))
    if parsed.hash:
        from hotbed.checkpoint.convert import content_hashes

        with _progress(f"hashing {place}") as progress:
            hashes = content_hashes(place, progress)
        whole = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
        description |= {"sha256": whole, "hashes": [{"of": name, "sha256": value} for name, value in hashes.items()]}
    print_description(console(), description)
    write_json(parsed.json, description)


def add_verify(parser: Parser) -> None:
    """Arguments of ``hotbed checkpoint verify``."""
    parser.add_argument("path", help="Checkpoint, or a run's directory; a path or a URI.")
    add_json(parser)


def verify(parsed: Namespace) -> None:
    """Read all of a checkpoint and compare it with the hashes in its manifest."""
    from hotbed.checkpoint import find_checkpoint, verify_checkpoint

    place = find_checkpoint(parsed.path)
    start = time.perf_counter()
    with _progress(f"verifying {place}") as progress:
        manifest = verify_checkpoint(place, progress)
    seconds = time.perf_counter() - start
    blocks = sum(len(entry.sha256) for entry in manifest.files.values())
    rate = manifest.nbytes / seconds
    console().print(
        f"{place}: {len(manifest.files):,} files, {blocks:,} blocks unharmed "
        f"({manifest.nbytes / 1e9:,.3f} GB, {rate / 1e9:,.2f} GB/s)",
        soft_wrap=True,
    )
    counts = {"files": len(manifest.files), "blocks": blocks, "bytes": manifest.nbytes}
    write_json(parsed.json, {"path": str(place), **counts, "seconds": seconds, "bytes_per_s": rate})


def add_convert(parser: Parser) -> None:
    """Arguments of ``hotbed checkpoint convert``."""
    parser.add_argument("source", help="What to convert: a path, of a checkpoint also a URI.")
    parser.add_argument("target", help="What to make: a path or URI where nothing is.")
    parser.add_argument("--from", dest="origin", type=Origin, default="hotbed", help="Who wrote the source.")
    parser.add_argument("--to", type=Form, default="hotbed", help="What to make of it.")
    parser.add_argument("--compact", action="store_true", help="Store only rows that training has changed.")
    parser.add_argument(
        "--dtype",
        type=str | dict[str, str] | None,
        help="fp32, bf16, fp16, int8 or fp8 for the rows of all tables, or {TABLE: DTYPE, …}; rounded to the nearest.",
    )
    parser.add_argument("--no_moments", action="store_true", help="Keep what prediction needs only.")
    parser.add_argument(
        "--names",
        help="Tables of another library's model, in its order, with commas between them; TABLE=KEY, … where weights "
        "have other names (--from embedding_bag or dcp, --to dcp); in a file, one a line: @FILE.",
    )
    parser.add_argument(
        "--prefix",
        default="",
        help="What the names of weights there begin with and those here do not: model.",
    )
    parser.add_argument("--collection", default="embeddings", help="Attribute of hotbed's model that is to have them.")
    parser.add_argument("--data", help="Data for --to torch; default: that of the recipe.")
    add_trust(parser)
    add_json(parser)


def convert(parsed: Namespace) -> None:
    """Make a checkpoint of another one or of another library's model, or files that other libraries read."""
    _refuse_options_without_effect(parsed)
    start = time.perf_counter()
    with _progress(f"converting {parsed.source}") as progress:
        made = _converted(parsed, progress)
    seconds = time.perf_counter() - start
    console().print(f"{parsed.target}: {len(made['tables']):,} tables, {seconds:.1f} s", soft_wrap=True)
    if parsed.origin != "hotbed":
        names = ", ".join(entry["table"] for entry in made["tables"])
        console().print(f"tables, in the order of the model's features: {names}", soft_wrap=True)
    write_json(parsed.json, {"source": parsed.source, "target": parsed.target, "seconds": seconds, **made})


def _converted(parsed: Namespace, progress: Callable[[int, int], None]) -> Mapping[str, Any]:
    from hotbed.checkpoint import find_checkpoint
    from hotbed.cli.inspect import describe_manifest

    target = parsed.target
    if parsed.origin != "hotbed":
        from hotbed.checkpoint.importers import import_checkpoint

        options: dict[str, Any] = {"names": _names(parsed.names), "collection": parsed.collection, "progress": progress}
        options["prefix"] = parsed.prefix
        return describe_manifest(target, import_checkpoint(parsed.source, target, parsed.origin, **options))
    if parsed.to == "torch":
        from hotbed.train.runs.model_export import export_single

        return export_single(parsed.source, target, parsed.data, trust_recipe=parsed.trust_recipe)
    source = find_checkpoint(parsed.source)
    if parsed.to == "dcp":
        from hotbed.checkpoint.export_dcp import export_dcp

        names = _names(parsed.names)
        if isinstance(names, list):
            raise RecipeError(f"--names is {parsed.names!r}, must be TABLE=KEY, … for --to dcp")
        place = local("target", target)
        return export_dcp(source, place, names=names, prefix=parsed.prefix, progress=progress)
    if parsed.to == "safetensors":
        from hotbed.checkpoint.convert import export_tables

        return export_tables(source, target, progress=progress)
    from hotbed.checkpoint.convert import convert

    how: dict[str, Any] = {"compact": parsed.compact, "dtype": parsed.dtype, "moments": not parsed.no_moments}
    return describe_manifest(target, convert(source, target, **how, progress=progress))


def _names(given: str | None) -> list[str] | dict[str, str] | None:
    """Names of tables, or by table the key of its weight: ``a, b``, ``a=net.a.weight, b=net.b.weight``, ``@FILE``."""
    if given is None:
        return None
    if given.startswith("@"):
        lines = read_text(local("--names", given[1:])).splitlines()
        found = [line.strip() for line in lines if line.strip()]
    else:
        found = [name.strip() for name in given.split(",")]
    if not any("=" in name for name in found):
        return found
    pairs = [name.partition("=") for name in found]
    for table, equals, key in pairs:
        if not (table.strip() and equals and key.strip()):
            raise RecipeError(f"--names has '{table}{equals}{key}' among others of the form TABLE=KEY; give all so")
    keys = {table.strip(): key.strip() for table, _, key in pairs}
    if len(keys) < len(pairs):
        raise RecipeError(f"--names gives a table twice: {', '.join(table for table, _, _ in pairs)}; name each once")
    return keys


def _refuse_options_without_effect(parsed: Namespace) -> None:
    """Raise `RecipeError` for an option that this conversion would not follow."""
    to_hotbed, from_hotbed = parsed.to == "hotbed", parsed.origin == "hotbed"
    if not to_hotbed and not from_hotbed:
        raise RecipeError(f"--from {parsed.origin} --to {parsed.to}: convert to hotbed first, then from there")
    named = not from_hotbed or parsed.to == "dcp"
    given = {
        "--compact": (parsed.compact, to_hotbed and from_hotbed, "from hotbed to hotbed"),
        "--dtype": (parsed.dtype is not None, to_hotbed and from_hotbed, "from hotbed to hotbed"),
        "--no_moments": (parsed.no_moments, to_hotbed and from_hotbed, "from hotbed to hotbed"),
        "--names": (parsed.names is not None, named, "from another library (--from), or to dcp (--to dcp)"),
        "--prefix": (bool(parsed.prefix), named, "from another library (--from), or to dcp (--to dcp)"),
        "--collection": (parsed.collection != "embeddings", not from_hotbed, "from another library (--from)"),
        "--data": (parsed.data is not None, parsed.to == "torch", "to torch (--to torch)"),
        "--trust_recipe": (parsed.trust_recipe, parsed.to == "torch", "to torch (--to torch)"),
    }
    for option, (is_given, serves, when) in given.items():
        if is_given and not serves:
            raise RecipeError(f"{option} has an effect only when converting {when}; leave it out")


def add_compact(parser: Parser) -> None:
    """Arguments of ``hotbed checkpoint compact``."""
    parser.add_argument("source", help="Checkpoint, or a run's directory; a path or a URI.")
    parser.add_argument("target", help="What to make: a path or URI where nothing is.")
    add_json(parser)


def compact(parsed: Namespace) -> None:
    """Make a full checkpoint, which needs no base, of a differential one."""
    from hotbed.checkpoint import find_checkpoint, read_manifest
    from hotbed.checkpoint.convert import convert
    from hotbed.cli.inspect import describe_manifest

    source = find_checkpoint(parsed.source)
    tables = [table.base or table for table in read_manifest(source).tables.values()]
    keyed = any(tile.keyed for table in tables for tile in table.tiles)
    with _progress(f"compacting {source}") as progress:
        made = describe_manifest(parsed.target, convert(source, parsed.target, compact=keyed, progress=progress))
    console().print(f"{parsed.target}: all rows of {source}, {made['bytes']:,} bytes", soft_wrap=True)
    write_json(parsed.json, {"source": str(source), "target": parsed.target, **made})


def add_changes(parser: Parser) -> None:
    """Arguments of ``hotbed checkpoint changes``."""
    parser.add_argument("source", help="Checkpoint, or a run's directory; a path or a URI.")
    parser.add_argument(
        "--since",
        help="Checkpoint that readers have, or the step of one beside it; without it all rows are written.",
    )
    parser.add_argument("--out", required=True, help="Parquet file to write.")
    add_json(parser)


def changes(parsed: Namespace) -> None:
    """Write the rows that changed between two checkpoints, by id, for servers that have the older one."""
    from hotbed.checkpoint import find_checkpoint
    from hotbed.checkpoint.changes import export_changes
    from hotbed.checkpoint.manifest import find_earlier

    target = local("--out", parsed.out)
    if target.suffix != ".parquet" or target.is_dir() or not target.absolute().parent.is_dir():
        raise RecipeError(f"--out is '{target}', must be a file NAME.parquet in a directory that exists")
    source = find_checkpoint(parsed.source)
    since = None if parsed.since is None else find_earlier(source, parsed.since)
    with _progress(f"comparing {source}") as progress:
        found = export_changes(source, target, since, progress=progress)
    counts = found["tables"].values()
    upserts, deletes = (sum(of[kind] for of in counts) for kind in ("upserts", "deletes"))
    base = "" if since is None else f" since step {found['base']:,}"
    console().print(
        f"{target}: {upserts:,} rows and {deletes:,} deleted ids of step {found['sequence']:,}{base}, "
        f"{target.stat().st_size:,} bytes",
        soft_wrap=True,
    )
    write_json(parsed.json, {"source": str(source), "since": None if since is None else str(since), **found})


@contextmanager
def _progress(what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on a terminal, a line elsewhere; gives what to call with done and total."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    stderr = console(stderr=True)
    if not stderr.is_terminal:
        stderr.print(f"{what} …", soft_wrap=True)
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


COMMANDS: Mapping[str, tuple[Command, Callable[[Namespace], None]]] = {
    name: (Command(text, add, f"hotbed checkpoint {name} {usage} [options]"), run)
    for name, text, usage, add, run in (
        ("inspect", "Show what a checkpoint holds.", "PATH", add_inspect, inspect_checkpoint),
        ("verify", "Compare all of a checkpoint with its hashes.", "PATH", add_verify, verify),
        ("convert", "Convert from and to other libraries, dtypes and forms.", "SOURCE TARGET", add_convert, convert),
        (
            "compact",
            "Make a full checkpoint of a differential one and its base.",
            "SOURCE TARGET",
            add_compact,
            compact,
        ),
        (
            "changes",
            "Write the rows that changed since another checkpoint, by id.",
            "SOURCE --since CHECKPOINT --out FILE",
            add_changes,
            changes,
        ),
    )
}
