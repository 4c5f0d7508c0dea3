"""``hotbed init``: a first recipe for a Parquet dataset."""

from __future__ import annotations

from pathlib import Path

import yaml

from hotbed.data import ParquetSource, draft_schema
from hotbed.errors import SpecError

_TEMPLATE = """\
# Drafted by `hotbed init` from the column names, types and a sample of {path}. Check the schema, then:
#   hotbed train THIS_FILE --dry_run
#   hotbed train THIS_FILE
name: {name}
data:
  path: {path}
  dim: 16                       # columns of every embedding table; or one number per table: {{users: 64, items: 32}}
  test_split: {test_split}
  source:
    class_path: hotbed.data.ParquetSource
    init_args:
{fraction}      # `rows` are about 4 × the distinct values in the sample; values are hashed to them. Columns with the
      # same `table` share one. `ids` is the number per sample, null where it varies. `weight` and `group` (for
      # grouped AUC) name columns.
      schema:
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


def draft_recipe(path: Path, label: str | None = None) -> str:
    """A commented recipe for a Parquet file or folder, as YAML.

    Parameters
    ----------
    path
        The file or folder.
    label
        Its label column, where the name is not a usual one.

    Raises
    ------
    DataError
        If there is no Parquet data, label or column to embed.
    """
    schema = draft_schema(path, label=label)
    test_split, fraction = _test_split(path, schema.to_dict())
    lines = yaml.safe_dump(schema.to_dict(), sort_keys=False, default_flow_style=None, width=120).splitlines()
    return _TEMPLATE.format(
        path=path,
        name=path.name.removesuffix(".parquet") or "run",
        test_split=test_split,
        fraction=fraction,
        schema="\n".join(f"        {line}" for line in lines),
        tasks=len(schema.labels),
    )


def _test_split(path: Path, schema: dict[str, object]) -> tuple[str, str]:
    """Split to test on, and the line that cuts it off where there is no folder for it."""
    if "test" in ParquetSource(path, schema).splits:
        return "test", ""
    try:
        ParquetSource(path, schema, test_fraction=0.1)
    except SpecError:
        return "null              # too few row groups to cut a test split; make a folder with train/ and test/", ""
    return "test", "      test_fraction: 0.1      # the last 10 %, cut between row groups\n"
