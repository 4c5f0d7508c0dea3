"""Protects that the recipes of models can be made: keys, arguments, columns and tables fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotbed.batch import Batch
from hotbed.config import Recipe
from hotbed.data import Schema, SparseColumn
from hotbed.data.source import Source
from hotbed.embed import plan_tables
from hotbed.files import read_yaml
from hotbed.train.runs.build import new_model

RECIPES = Path(__file__).parents[2] / "recipes"
CRITEO = Schema(
    sparse=tuple(SparseColumn(name=f"C{i}", rows=100) for i in range(1, 27)),
    dense=tuple(f"I{i}" for i in range(1, 14)),
)


class Columns(Source):
    """Columns without samples."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.splits = schema, ()

    def _chunks(self, split: str) -> list[int]:
        raise NotImplementedError

    def _read(self, split: str, i: int) -> Batch:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("criteo_kaggle_deepfm", 2 * 2600),
        ("amazon_electronics_din", 4_194_304 + 1_048_576 + 16_384),
        ("movielens_1m_sasrec", 65_536),
        ("movielens_1m_hstu", 65_536),
        ("movielens_1m_two_tower", 131_072 + 128 + 512 + 65_536 + 512),
    ],
)
def test_the_model_of_a_recipe_is_made(name: str, rows: int) -> None:
    recipe = Recipe.from_dict(read_yaml(RECIPES / f"{name}.yaml"))
    given = recipe.data.source.init_args.get("schema")
    with torch.device("meta"):
        model = new_model(recipe, Columns(CRITEO if given is None else Schema.from_dict(given)))
    assert name.replace("_", "").endswith(type(model).__name__.lower())
    assert sum(table.rows for table in plan_tables(model)) == rows
