"""Show what data hold, how they differ from others, and what is not as a recipe says: ``hotbed inspect DATA``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.table import Table

from hotbed.checkpoint import MANIFEST
from hotbed.checkpoint.single_files import read_yaml, write_text
from hotbed.commands.arguments import Parser, check_json
from hotbed.commands.inspect_page import distinct_text, number_text, page
from hotbed.config import Recipe, import_from
from hotbed.data import NpySource
from hotbed.data.arrow import Ids
from hotbed.data.encoding import MARKERS
from hotbed.data.inspection import DataSummary, SchemaChecks, compare, faults_error, summarize
from hotbed.data.schema import Schema
from hotbed.data.stored_rows import SourceRows, StoredRows, open_rows
from hotbed.errors import DataError, RecipeError
from hotbed.locations import location
from hotbed.train.build import new_source
from hotbed.train.report import StageProgress


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What ``hotbed inspect`` is asked of data."""

    against: str | None = None
    recipe: str | None = None
    label: str | None = None
    html: str | None = None

    @property
    def given(self) -> list[str]:
        """Options that were set."""
        return [name for name, value in asdict(self).items() if value is not None]


class Expected(NamedTuple):
    """What a recipe says of data."""

    recipe: str
    schema: Schema
    ids: Ids


class Inspected(NamedTuple):
    """What was found: plain values, and the error that data are not as a recipe says, or None."""

    found: dict[str, Any]
    error: DataError | None


def add_data_arguments(parser: Parser) -> None:
    """Add the options of data."""
    parser.add_argument("--against", help="Earlier data, another day's: how do these differ from it?")
    parser.add_argument("--recipe", help="Recipe that the data must fit: names, types, ids in range.")
    parser.add_argument("--label", help="Label column, where its name is not a usual one.")
    parser.add_argument("--html", help="File for a page with pictures of data, or of a run.")


def inspect_data(path: str | Path, options: DataOptions, console: Console) -> Inspected:
    """Read all rows of a dataset once, those of `DataOptions.against` before it."""
    if options.html is not None:
        check_json(options.html, "--html")
    recipe = options.recipe
    if is_recipe(path):
        if recipe is not None:
            raise RecipeError(f"{path} is a recipe itself; leave out --recipe, or give the data in its place")
        recipe = str(path)
    if options.label is not None and recipe is not None:
        raise RecipeError("--label and a recipe both say what the label is; leave --label out")
    expected, source = (None, None) if recipe is None else _expected(recipe, with_source=is_recipe(path))
    schema = None if expected is None else expected.schema
    data = _opened(path, schema) if source is None else source
    checks = None if expected is None else SchemaChecks(data, expected.schema, expected.ids)
    before: DataSummary | None = None
    with StageProgress(console) as progress:
        if options.against is not None:
            earlier = _opened(location(options.against), schema)
            before = summarize(
                earlier, schema=schema, label=options.label, progress=lambda d, n: progress("against", d, n)
            )
        after = summarize(
            data,
            schema=schema,
            checks=checks,
            label=options.label,
            earlier=before,
            progress=lambda d, n: progress("inspect", d, n),
        )
    found = after.to_dict()
    if isinstance(data, SourceRows):
        found["tables"] = [{"table": name, "rows": rows} for name, rows in data.tables.items()]
    if before is not None:
        found["against"] = compare(before, after)
    if expected is not None:
        found |= {"recipe": expected.recipe, "faults": [asdict(fault) for fault in after.faults]}
    if options.html is not None:
        write_text(options.html, page(found, after, before))
    wrong = expected is not None and after.faults
    return Inspected(found, faults_error(str(path), str(recipe), after.faults) if wrong else None)


def is_recipe(path: str | Path) -> bool:
    """Whether a path is that of a recipe's file, by its name."""
    if isinstance(path, Path) and not path.is_file():
        return False
    name = str(path if isinstance(path, Path) else path.partition("?")[0]).rsplit("/", 1)[-1]
    return name.endswith((".yaml", ".yml")) and name not in MARKERS.values()


def _opened(path: str | Path, schema: Schema | None) -> StoredRows:
    try:
        return open_rows(path, schema)
    except DataError as error:
        raise DataError(
            f"{path} is no prepared dataset ({', '.join(MARKERS.values())}), run (recipe.yaml), checkpoint "
            f"({MANIFEST}), Parquet or arrays (day_0_sparse.npy): {error}"
        ) from None


def _expected(name: str, *, with_source: bool) -> tuple[Expected, SourceRows | None]:
    """What a recipe says of data, and, where that is asked for, the rows of its own source."""
    path = location(name)
    recipe = Recipe.from_dict(read_yaml(path))
    if isinstance(path, Path):
        import_from(path.parent)
    args = recipe.data.source.init_args
    if isinstance(given := args.get("schema"), Mapping) and not with_source:
        ids: Ids = _ids_of_arrays(args) if _is_of_arrays(recipe) else args.get("ids", "hash")
        return Expected(name, Schema.from_dict(cast("Mapping[str, object]", given)), ids), None
    source = new_source(recipe.data)
    ids = _ids_of_arrays(args) if _is_of_arrays(recipe) and not with_source else getattr(source, "ids", "raw")
    expected = Expected(name, source.schema, ids)
    return expected, SourceRows(recipe.data.path, source, "source of a recipe") if with_source else None


def _is_of_arrays(recipe: Recipe) -> bool:
    return recipe.data.source.class_path.rpartition(".")[2] == NpySource.__name__


def _ids_of_arrays(args: Mapping[str, Any]) -> Ids:
    """Ids that are taken modulo the rows may be any."""
    return "hash" if args.get("modulo") else "raw"


# -- printed -----------------------------------------------------------------------------------------------------


def print_data(console: Console, found: Mapping[str, Any]) -> None:
    """Print what `inspect_data` found: rows, labels, a line per column, drift, and faults."""
    splits = ", ".join(f"{split} {n:,}" for split, n in found["samples"].items() if split != "all")
    more = "".join(f", {found[key]:,} {key.replace('_', ' ')}" for key in ("files", "row_groups") if key in found)
    console.print(f"{found['path']}: {found['kind']}, {found['rows']:,} rows{more}", soft_wrap=True)
    if splits:
        console.print(f"splits: {splits}", soft_wrap=True)
    for label in found["labels"]:
        low, high = label["interval"]
        rule = f", positive where {label['positive']}" if "positive" in label else ""
        by_split = "".join(f"; {split} {rate:.3%}" for split, rate in label["rate_by_split"].items())
        words = f"label {label['label']}: {label['rate']:.3%} positive ({low:.3%} to {high:.3%}{rule}){by_split}"
        console.print(words, soft_wrap=True)
    if "no_label" in found:
        console.print(f"no label: {found['no_label']}", soft_wrap=True)
    console.print(_columns(found["columns"]))
    if "against" in found:
        _print_drift(console, found["against"])
    for fault in found.get("faults", ()):
        times = f" ({fault['values']:,} values)" if fault["values"] else ""
        console.print(f"✗ {fault['problem']}{times}: {fault['message']}", soft_wrap=True)
    if found.get("faults") == []:
        console.print(f"all rows are what {found['recipe']} says", soft_wrap=True)


def _columns(columns: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="columns", title_justify="left")
    for name in ("column", "type", "missing", "distinct", "hottest", "its share", "Zipf", "ids", "low", "mean", "high"):
        table.add_column(name, justify="left" if name in ("column", "type", "hottest") else "right", overflow="fold")
    for column in columns:
        numbers: Mapping[str, Any] = column.get("numbers", {})
        hottest = (column.get("hottest") or [{}])[0]
        exponent = column.get("zipf_exponent")
        table.add_row(
            column["column"],
            column["type"],
            f"{column['missing']:.2%}" if column["missing"] else "–",
            distinct_text(column),
            str(hottest.get("value", "–"))[:40],
            f"{hottest['share']:.2%}" if hottest else "–",
            "–" if exponent is None else f"{exponent:.2f}",
            f"{column['lengths']['mean']:.3g}" if "lengths" in column else "–",
            *(number_text(numbers.get(key)) for key in ("low", "mean", "high")),
        )
    return table


def _print_drift(console: Console, drift: Mapping[str, Any]) -> None:
    console.print(f"against {drift['path']}, {drift['rows']:,} rows:", soft_wrap=True)
    for label in drift["labels"]:
        before, after = label["rates"]
        low, high = label["interval"]
        words = (
            f"label {label['label']}: {before:.3%} → {after:.3%}, {label['change']:+.3%} ({low:+.3%} to {high:+.3%})"
        )
        console.print(words, soft_wrap=True)
    table = Table(title="drift", title_justify="left")
    for name in ("column", "stability index", "Jensen-Shannon", "unseen", "new values", "missing before", "now"):
        table.add_column(name, justify="left" if name == "column" else "right", overflow="fold")
    for column in drift["columns"]:
        index, divergence = (column.get(key) for key in ("stability_index", "jensen_shannon"))
        table.add_row(
            column["column"],
            "–" if index is None else f"{index:.3f}",
            "–" if divergence is None else f"{divergence:.4f}",
            unseen_text(column),
            f"{column['unseen_values']:,}" if "unseen_values" in column else "–",
            *(f"{share:.2%}" for share in column["missing"]),
        )
    console.print(table)
    for key, where in (("only_before", "are no longer there"), ("only_after", "are new")):
        if drift[key]:
            console.print(f"columns that {where}: {', '.join(drift[key])}", soft_wrap=True)


def unseen_text(column: Mapping[str, Any]) -> str:
    """Share of the values that were not seen before, with its error where it is estimated."""
    if "unseen_share" not in column:
        return "–"
    error = column["unseen_share_error"]
    return f"{column['unseen_share']:.2%}" + (f" ± {error:.2%}" if error else "")
