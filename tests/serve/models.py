"""Models of every kind that is exported, and batches for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.data import Encoder, Schema, SparseColumn
from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.nn import DLRM, MLP, DCNv2, DLRMEnsemble, WideDeep
from hotbed.nn.dense_program import DensePart, trace_dense_part
from hotbed.serve.model_files import ExportedModel
from hotbed.specs import Feature, Table
from hotbed.train.runs.model_export import Model

TABLES = [
    Table("user", 50, 16),
    Table("tags", 30, 16, dtype="int8"),
    Table("seen", 40, 16, dtype="bf16", fp32_rows=9),
]
FEATURES = [
    Feature("user", "user"),
    Feature("tags", "tags", pooling="mean"),
    Feature("seen", "seen"),
    Feature("rated", "seen", pooling="mean", max_len=2, on_too_long="truncate"),
]
HISTORY = Feature("history", "seen", pooling="none", max_len=5, on_too_long="truncate")


class Attention(nn.Module):
    """A user's model: weights the vectors of a sequence by the pooled ones of another feature."""

    def __init__(self, tables: list[Table], features: list[Feature], dense_features: int, **_: Any) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables, [*features, HISTORY])
        self.query, self.top = nn.Linear(16, 16), MLP(16 * 2 + dense_features, (8, 1), last_relu=False)

    def forward(self, batch: Batch) -> Tensor:
        e = self.embeddings(batch.sparse)
        vectors, mask = e.padded("history")
        weights = (vectors @ self.query(e["user"])[:, :, None]).squeeze(2).masked_fill(~mask, -1e9).softmax(1)
        history = (weights[:, :, None] * vectors).sum(1)
        assert batch.dense is not None
        return self.top(torch.cat([history, e["rated"], batch.dense], dim=1))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "DLRM": lambda **given: DLRM(**given, bottom=[32, 16], top=[24, 1]),
    "DLRMEnsemble": lambda **given: DLRMEnsemble(**given, members=2, bottom=[8], top=[12, 2]),
    "DCNv2": lambda **given: DCNv2(**given, layers=2, low_rank=5, top=[20, 1]),
    "WideDeep": lambda **given: WideDeep(**given, top=[8, 2]),
    "Attention": lambda **given: Attention(**given),
}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[kind](tables=TABLES, features=FEATURES, dense_features=2).eval()


def batch_of(size: int, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    rows = {"user": 50, "tags": 30, "seen": 40, "rated": 40, "history": 40}

    def bag(feature: str) -> list[int]:
        count = int(torch.randint(0, 7, (), generator=draw)) if feature != "user" else 1
        return torch.randint(rows[feature], (count,), generator=draw).tolist()

    ids = Jagged.from_dict({feature: [bag(feature) for _ in range(size)] for feature in rows})
    return Batch(sparse=ids, dense=torch.randn(size, 2, generator=draw))


class Wide(nn.Module):
    """A model whose tables are of every form."""

    def __init__(self, tables: list[Table]) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables, [Feature(t.name, t.name) for t in tables], seed=3)
        self.top = nn.Linear(sum(t.dim for t in tables), 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.top(self.embeddings(batch.sparse).concatenate())


FORMS = [
    Table("fp32", 300, 7),
    Table("bf16", 300, 7, dtype="bf16"),
    Table("fp16", 300, 1, dtype="fp16", fp32_rows=120),
    Table("int8", 300, 130, dtype="int8", fp32_rows=33),
    Table("fp8", 300, 5, dtype="fp8"),
    Table("wide", 300, 5, dtype="int8", fp32_rows=300),
    Table('a/b "ü\'s" 9%27', 300, 3, dtype="int8"),
]


def described(model: nn.Module) -> tuple[Model, Any]:
    """What is exported of a model whose tables stay where they are, and its program."""
    part = DensePart(model)
    program = trace_dense_part(part, 0)
    columns = [SparseColumn(name=f.name, rows=300) for _, f in part.features.values()]
    encoder = Encoder(Schema(sparse=tuple(columns), labels=("y",)), ids="raw")
    given = {"encoder": encoder, "hash": None, "collections": part.collections, "state": part.state_dict()}
    return Model("m", ("y",), **given, inputs=0, dtype=torch.float32), program


def vectors_of(model: ExportedModel, table: str, rows: Tensor) -> Tensor:
    """Rows of a table ``[n]`` int64 as float32 ``[n, D]``."""
    entry = model.manifest.tables[table]
    records = torch.empty(len(rows), entry.record_bytes, dtype=torch.uint8)
    records.numpy()[:] = model.records(table)[rows.numpy()]
    return entry.records().rows(records, entry.is_wide(rows))
