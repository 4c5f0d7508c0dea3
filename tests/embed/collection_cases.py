"""Cases: a collection of three tables and four features, and batches for it."""

import torch

from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.specs import Feature, Table

TABLES = [Table("users", rows=50, dim=8), Table("items", rows=30, dim=8), Table("words", rows=20, dim=3)]
FEATURES = [
    Feature("user", table="users"),
    Feature("text", table="words", pooling="mean"),
    Feature("item", table="items"),
    Feature("history", table="items"),
]


def make(**options) -> EmbeddingCollection:
    return EmbeddingCollection(TABLES, FEATURES, **options)


def ids(size: int = 4, seed: int = 0) -> Jagged:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (size,), generator=draw).tolist()
    return Jagged.from_dict(
        {
            "user": torch.randint(0, 50, (size,), generator=draw),
            "text": [torch.randint(0, 20, (n,), generator=draw).tolist() for n in lengths],
            "item": torch.randint(0, 30, (size,), generator=draw),
            "history": torch.randint(0, 30, (size, 3), generator=draw),
        }
    )


def expected(collection: EmbeddingCollection, batch: Jagged) -> dict[str, torch.Tensor]:
    out = {}
    for feature in FEATURES:
        bags = batch[feature.name]
        offsets = torch.nn.functional.pad(bags.lengths().cumsum(0), (1, 0))[:-1]
        out[feature.name] = torch.nn.functional.embedding_bag(
            bags.values, collection.weight(feature.table), offsets, mode=feature.pooling
        )
    return out
