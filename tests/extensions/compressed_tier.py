"""A new tier is used by plans and by recipes."""

import torch

import hotbed as hb
from hotbed.config import MemoryRecipe
from hotbed.store import Span, Storage


def test_compressed_tier() -> None:
    recipe = MemoryRecipe(tier="compressed", cache_rows=7)
    cpu, slots = torch.device("cpu"), torch.arange(0, 40, 3)
    store = Storage(recipe.tier, recipe.cache_rows).make([Span(40)], 8, dtype="fp32", device=cpu, backend="auto")
    values = torch.randn(len(slots), 8)
    store.write(slots, values)
    assert torch.equal(store.read(slots), values)
    assert hb.make_plan([hb.Table("users", rows=9, dim=8)], 1, hb.Cut(tier="compressed")).tiles[0].tier == "compressed"
