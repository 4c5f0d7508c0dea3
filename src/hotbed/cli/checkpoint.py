"""Inspect, verify and convert checkpoints: ``hotbed checkpoint inspect | verify | convert | compact | changes``."""

from __future__ import annotations

import hashlib
import json
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from hotbed.cli.arguments import Command, Parser, add_json, add_trust, console, save_json
from hotbed.errors import RecipeError
from hotbed.files import read_text
from hotbed.locations import local

Origin = Literal["hotbed", "nvidia_dlrm", "torchrec", "facebook_dlrm", "embedding_bag", "dcp"]
Form = Literal["hotbed", "safetensors", "torch", "dcp"]


def add_arguments(parser: Parser) -> None:
    """Add the subcommands."""
    parser.usage = "hotbed checkpoint COMMAND …"
    parser.add_commands("action", {name: command for name, (command, _) in COMMANDS.items()})


def run(parsed: Namespace) -> None:
    """Run a subcommand."""
    COMMANDS[parsed.action][1](parsed)


def _add_path(parser: Parser, name: str = "path") -> None:
    parser.add_argument(name, help="Path or URI of a checkpoint or run.")
    add_json(parser)


def _add_both(parser: Parser) -> None:
    _add_path(parser, "source")
    parser.add_argument("target", help="New path or URI.")


def _add_inspect(parser: Parser) -> None:
    _add_path(parser)
    text = "Also print hashes of all values. These hashes do not depend on the plan."
    parser.add_argument("--hash", action="store_true", help=text)


def _inspect(parsed: Namespace) -> None:
    """Print a checkpoint's manifest."""
    from hotbed.checkpoint import find_checkpoint, read_manifest
    from hotbed.cli.inspect import describe_manifest, print_description

    source = find_checkpoint(parsed.path)
    description = describe_manifest(source, read_manifest(source))
    if parsed.hash:
        from hotbed.checkpoint.convert import content_hashes

        with _progress(f"hashing {source}") as progress:
            hashes = content_hashes(source, progress)
        whole = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
        description |= {"sha256": whole, "hashes": [{"of": name, "sha256": value} for name, value in hashes.items()]}
    print_description(console(), description)
    save_json(parsed.json, description)


def _verify(parsed: Namespace) -> None:
    """Read a whole checkpoint, and compare it with the hashes in its manifest."""
    from hotbed.checkpoint import find_checkpoint, verify_checkpoint

    source = find_checkpoint(parsed.path)
    start = time.perf_counter()
    with _progress(f"verifying {source}") as progress:
        manifest = verify_checkpoint(source, progress)
    seconds, count, nbytes = time.perf_counter() - start, len(manifest.files), manifest.nbytes
    blocks, rate = sum(len(entry.sha256) for entry in manifest.files.values()), nbytes / seconds
    sizes = f"({nbytes / 1e9:,.3f} GB, {rate / 1e9:,.2f} GB/s)"
    console().print(f"{source}: {count:,} files, {blocks:,} blocks undamaged {sizes}", soft_wrap=True)
    found = {"path": str(source), "files": count, "blocks": blocks, "bytes": nbytes}
    save_json(parsed.json, found | {"seconds": seconds, "bytes_per_s": rate})


def _add_convert(parser: Parser) -> None:
    parser.add_argument("source", help="File or directory to convert, or the URI of a checkpoint.")
    parser.add_argument("target", help="New path or URI.")
    parser.add_argument("--from", dest="origin", type=Origin, default="hotbed", help="Library that wrote the source.")
    parser.add_argument("--to", type=Form, default="hotbed", help="Format of the target.")
    parser.add_argument("--compact", action="store_true", help="Store only the rows that training has changed.")
    parser.add_argument(
        "--dtype",
        type=str | dict[str, str] | None,
        help="Dtype of rows, or {TABLE: DTYPE, …}: fp32, bf16, fp16, int8 or fp8. Values are rounded to nearest.",
    )
    parser.add_argument("--no_moments", action="store_true", help="Leave out the optimizer states.")
    parser.add_argument(
        "--names",
        help="Names for the tables of a different library's model, in its order, e.g. `user,item`; or TABLE=KEY, … "
        "with the keys of weights (--from embedding_bag or dcp, --to dcp); or @FILE with one entry per line.",
    )
    parser.add_argument(
        "--prefix", default="", help="Prefix of weight names, e.g. `model.`. --from strips it, and --to adds it."
    )
    parser.add_argument("--collection", default="embeddings", help="Attribute of hotbed's model with the tables.")
    parser.add_argument("--data", help="Data for --to torch (default: the recipe's data).")
    add_trust(parser)
    add_json(parser)


def _convert(parsed: Namespace) -> None:
    """Convert a checkpoint, import the model of a different library, or export a checkpoint for a different library."""
    to_hotbed, from_hotbed = parsed.to == "hotbed", parsed.origin == "hotbed"
    if not to_hotbed and not from_hotbed:
        fix = "Convert to hotbed first, and then from hotbed"
        raise RecipeError(f"--from {parsed.origin} --to {parsed.to}: expected hotbed in one of both. {fix}")
    within = (to_hotbed and from_hotbed, "from hotbed to hotbed")
    named = (not from_hotbed or parsed.to == "dcp", "from another library (--from), or to dcp (--to dcp)")
    to_torch = (parsed.to == "torch", "to torch (--to torch)")
    for option, is_given, (works, when) in (
        ("compact", parsed.compact, within),
        ("dtype", parsed.dtype is not None, within),
        ("no_moments", parsed.no_moments, within),
        ("names", parsed.names is not None, named),
        ("prefix", parsed.prefix, named),
        ("collection", parsed.collection != "embeddings", (not from_hotbed, "from another library (--from)")),
        ("data", parsed.data is not None, to_torch),
        ("trust_recipe", parsed.trust_recipe, to_torch),
    ):
        if is_given and not works:
            raise RecipeError(f"--{option} has an effect only when converting {when}. Remove --{option}")
    start = time.perf_counter()
    with _progress(f"converting {parsed.source}") as progress:
        made = _run_conversion(parsed, progress)
    seconds = time.perf_counter() - start
    console().print(f"{parsed.target}: {len(made['tables']):,} tables, {seconds:.1f} s", soft_wrap=True)
    if parsed.origin != "hotbed":
        names = ", ".join(entry["table"] for entry in made["tables"])
        console().print(f"tables, in the order of the model's features: {names}", soft_wrap=True)
    save_json(parsed.json, {"source": parsed.source, "target": parsed.target, "seconds": seconds, **made})


def _run_conversion(parsed: Namespace, progress: Callable[[int, int], None]) -> Mapping[str, Any]:
    from hotbed.checkpoint import find_checkpoint
    from hotbed.cli.inspect import describe_manifest

    target = parsed.target
    if parsed.origin != "hotbed":
        from hotbed.checkpoint.importers import import_checkpoint

        options: dict[str, Any] = {"names": _parse_names(parsed.names), "progress": progress}
        options |= {"prefix": parsed.prefix, "collection": parsed.collection}
        return describe_manifest(target, import_checkpoint(parsed.source, target, parsed.origin, **options))
    if parsed.to == "torch":
        from hotbed.train.runs.model_export import export_single

        return export_single(parsed.source, target, parsed.data, trust_recipe=parsed.trust_recipe)
    source = find_checkpoint(parsed.source)
    if parsed.to == "dcp":
        from hotbed.checkpoint.export_dcp import export_dcp

        names = _parse_names(parsed.names)
        if isinstance(names, list):
            raise RecipeError(f"--names: got {parsed.names!r}, expected entries TABLE=KEY for --to dcp")
        return export_dcp(source, local("target", target), names=names, prefix=parsed.prefix, progress=progress)
    if parsed.to == "safetensors":
        from hotbed.checkpoint.convert import export_tables

        return export_tables(source, target, progress=progress)
    from hotbed.checkpoint.convert import convert

    options = {"compact": parsed.compact, "dtype": parsed.dtype, "moments": not parsed.no_moments}
    return describe_manifest(target, convert(source, target, **options, progress=progress))


def _parse_names(text: str | None) -> list[str] | dict[str, str] | None:
    """Parse names of tables (``a, b``), or keys of weights by table (``a=net.a.weight, …``).

    ``@FILE`` names a file that contains one of these forms, with an entry per line.
    """
    if text is None:
        return None
    entries = read_text(local("--names", text[1:])).splitlines() if text.startswith("@") else text.split(",")
    found = [entry.strip() for entry in entries if entry.strip() or not text.startswith("@")]
    if not any("=" in name for name in found):
        return found
    pairs = [name.partition("=") for name in found]
    for table, equals, key in pairs:
        if not (table.strip() and equals and key.strip()):
            raise RecipeError(
                f"--names: got '{table}{equals}{key}' among entries TABLE=KEY, expected a table and a key"
            )
    keys = {table.strip(): key.strip() for table, _, key in pairs}
    if len(keys) < len(pairs):
        raise RecipeError(f"--names: got a table twice in {', '.join(table for table, _, _ in pairs)}. Remove one")
    return keys


def _compact(parsed: Namespace) -> None:
    """Merge a differential checkpoint and its base into a full checkpoint."""
    from hotbed.checkpoint import find_checkpoint, read_manifest
    from hotbed.checkpoint.convert import convert
    from hotbed.cli.inspect import describe_manifest

    source = find_checkpoint(parsed.source)
    tables = [table.base or table for table in read_manifest(source).tables.values()]
    keyed = any(tile.keyed for table in tables for tile in table.tiles)
    with _progress(f"compacting {source}") as progress:
        made = describe_manifest(parsed.target, convert(source, parsed.target, compact=keyed, progress=progress))
    console().print(f"{parsed.target}: all rows of {source}, {made['bytes']:,} bytes", soft_wrap=True)
    save_json(parsed.json, {"source": str(source), "target": parsed.target, **made})


def _add_changes(parser: Parser) -> None:
    _add_path(parser, "source")
    parser.add_argument("--since", help="Earlier checkpoint, or its step in the same run (default: write all rows).")
    parser.add_argument("--out", required=True, help="Parquet file to write.")


def _changes(parsed: Namespace) -> None:
    """Write the rows that changed since an earlier checkpoint, by id, for servers that have the earlier checkpoint."""
    from hotbed.checkpoint import find_checkpoint
    from hotbed.checkpoint.changes import export_changes
    from hotbed.checkpoint.manifest import find_earlier
    from hotbed.cli.export import format_changes

    target = local("--out", parsed.out)
    if target.suffix != ".parquet" or target.is_dir() or not target.absolute().parent.is_dir():
        raise RecipeError(f"--out: got '{target}', expected a file NAME.parquet in a directory that exists")
    source = find_checkpoint(parsed.source)
    since = None if parsed.since is None else find_earlier(source, parsed.since)
    with _progress(f"comparing {source}") as progress:
        found = export_changes(source, target, since, progress=progress)
    console().print(f"{target}: {format_changes(found)}, {target.stat().st_size:,} bytes", soft_wrap=True)
    save_json(parsed.json, {"source": str(source), "since": None if since is None else str(since), **found})


@contextmanager
def _progress(what: str) -> Generator[Callable[[int, int], None]]:
    """Yield a function that shows done and total work in a bar. If there is no terminal, print one line instead."""
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


_CHANGES = "SOURCE --since CHECKPOINT --out FILE"
COMMANDS: Mapping[str, tuple[Command, Callable[[Namespace], None]]] = {
    name: (Command(text, add, f"hotbed checkpoint {name} {usage} [options]"), run)
    for name, text, usage, add, run in (
        ("inspect", "Print a checkpoint's contents.", "PATH", _add_inspect, _inspect),
        ("verify", "Compare a checkpoint with its hashes.", "PATH", _add_path, _verify),
        ("convert", "Convert from and to other libraries and dtypes.", "SOURCE TARGET", _add_convert, _convert),
        ("compact", "Merge a differential checkpoint and its base.", "SOURCE TARGET", _add_both, _compact),
        ("changes", "Write the rows that changed since another checkpoint.", _CHANGES, _add_changes, _changes),
    )
}
