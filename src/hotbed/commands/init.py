"""Draft a first recipe for a Parquet dataset: ``hotbed init``."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from hotbed.errors import RecipeError, SpecError
from hotbed.files import local, location, write_text, yaml_text

if TYPE_CHECKING:
    from hotbed.data import ParquetSource, Schema

_TEMPLATE = """\
# Drafted by `hotbed init` from the column names, types and a sample of the data. Check the schema, then:
#   hotbed train THIS_FILE --dry_run
#   hotbed train THIS_FILE
name: {name}
data:
  path: {path}
  dim: 16                       # columns of every embedding table; or one number per table: {{users: 64, items: 32}}
{splits}  source:
    class_path: hotbed.data.ParquetSource
    init_args:
{fraction}{left_out}      # `rows` are about 4 × the distinct values in the sample; values are hashed to them. Columns
      # with the same `table` share one. `ids` is the number per sample, null where it varies. `weight` and `group` (for
      # grouped AUC) name columns.
{scaling}      schema:
{schema}
model:
  class_path: hotbed.nn.DLRM    # or a class of yours: made with tables=, features=, dense_features=, seed=
  init_args:
    bottom: [256, 64, 16]       # ends with data.dim
    top: [512, 256, {tasks}]          # ends with the number of labels
dense_optimizer:
  class_path: torch.optim.Adam
  init_args: {{lr: 0.001}}
sparse_optimizer:
  class_path: hotbed.optim.RowWiseAdagrad
  init_args: {{lr: 0.05}}
schedule:
  warmup_steps: 100
train:
  batch_size: 1024
  epochs: 1
"""
_SCALING = """\
      # A number x of `dense` becomes asinh((x - center) / scale), as networks need inputs of about the size of 1: the
      # center is the median in the sample, the scale is by its quartiles the usual distance from it. Missing and
      # infinite values become 0. Write just a column's name to take it as it is; leave out columns that say nothing.
"""
_LONGEST_NAME = 100


def add_arguments(parser: ArgumentParser) -> None:
    """Add the data, its label and the recipe's file."""
    parser.usage = "hotbed init PATH [options]"
    parser.add_argument("path", type=str, help="Parquet file or folder; a path or a URI.")
    parser.add_argument("--label", type=str | None, help="Label column, where its name is not a usual one.")
    parser.add_argument("--out", type=str | None, help="Recipe to write; it must not exist. Default: stdout.")


def run(parsed: Namespace) -> None:
    """Draft a recipe, and write or print it."""
    out = None if parsed.out is None else local("--out", parsed.out)
    if out is not None and out.exists():
        raise RecipeError(f"{out} exists already and is not overwritten; choose another --out")
    text = draft_recipe(location(parsed.path), parsed.label)
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)


def draft_recipe(path: str | Path, label: str | None = None) -> str:
    """Write a commented recipe for a Parquet file or folder, as YAML.

    Parameters
    ----------
    path
        File, folder or URI, as for `ParquetSource`. Its splits are those of the recipe; where there are none, the last
        10 % are the test split.
    label
        Its label column, where the name is not a usual one.

    Raises
    ------
    DataError
        If there is no Parquet data, label or column to embed, or a label is not from 0 to 1.
    """
    from hotbed.data import ParquetSource, draft_schema

    schema = draft_schema(path, label=label)
    plain = schema.to_dict()
    source = ParquetSource(path, plain)
    for split in source.splits:
        source.check_labels(split)
    splits, fraction = _splits(path, source, plain)
    lines = yaml_text(plain, width=112).split("\n")
    return _TEMPLATE.format(
        path=yaml_text(str(path)),
        name=yaml_text(_run_name(path)),
        splits=splits,
        fraction=fraction,
        left_out=_left_out(source, schema),
        scaling=_SCALING if schema.scaling else "",
        schema="\n".join(f"        {line}" for line in lines),
        tasks=len(schema.labels),
    )


def _left_out(source: ParquetSource, schema: Schema) -> str:
    """Comment that names the columns which the recipe does not use, with their types; nothing where there is none."""
    used = {*schema.labels, *schema.dense, schema.weight, *(column.name for column in schema.sparse)}
    unused = [f"{name!r} ({kind})" for name, kind in source.column_types().items() if name not in used]
    if not unused:
        return ""
    text = f"Left out, for these types are no inputs yet: {', '.join(unused)}."
    return "".join(f"      # {line}\n" for line in textwrap.wrap(text, 110, break_on_hyphens=False))


def _splits(path: str | Path, source: ParquetSource, schema: dict[str, object]) -> tuple[str, str]:
    """Lines for the splits to evaluate and test on, and the line that cuts one off where there is none."""
    from hotbed.data import ParquetSource

    valid = "  valid_split: valid\n" if "valid" in source.splits else ""
    if "test" in source.splits:
        return f"{valid}  test_split: test\n", ""
    try:
        ParquetSource(path, schema, test_fraction=0.1)
    except SpecError:  # too few row groups, or only folders of other splits
        why = "none can be cut off; make a folder with train/ and test/, or write smaller row groups"
        return f"{valid}  test_split: null              # {why}\n", ""
    return "  test_split: test\n", "      test_fraction: 0.1      # the last 10 %, cut between row groups\n"


def _run_name(path: str | Path) -> str:
    """Name of the data, as far as directories can have it on any system."""
    plain = str(path).partition("?")[0] if "://" in str(path) else str(path)
    last = re.split(r"[/\\]", plain.rstrip("/\\"))[-1]
    if last in ("", ".", ".."):
        last = Path(path).resolve().name
    name = re.sub(r"\.(parquet|parq|pq)$", "", last)
    name = "".join(c if c.isprintable() and c not in '<>:"|?*' else "_" for c in name)
    name = name.encode()[:_LONGEST_NAME].decode(errors="ignore").strip(" .") or "run"
    return f"run-{name}" if name.lower() in ("null", "~") else name  # which stand for no name on the command line
