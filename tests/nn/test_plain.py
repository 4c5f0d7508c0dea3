"""Protects that models as plain torch programs give the logits that they gave."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.batch import Batch
from hotbed.data import Schema, SparseColumn
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError, SpecError
from hotbed.jagged import Jagged, offsets_of
from hotbed.nn import DIN, DLRM, WideDeep
from hotbed.nn.dense_program import plain_model, trace_whole
from hotbed.specs import Feature, OnBadId, Table

SCHEMA = Schema(
    sparse=(
        SparseColumn(name="user", rows=50),
        SparseColumn(name="tags", rows=30, ids=3, pooling="mean"),
        SparseColumn(name="seen", rows=40, ids=None),
        SparseColumn(name="rated", rows=40, table="seen", ids=None, pooling="mean"),
    ),
    dense=("x", "y"),
)


def inputs(size: int, *, bad: bool = False) -> tuple[Tensor, dict[str, Any]]:
    draw = torch.Generator().manual_seed(size)

    def ids(rows: int, *shape: int) -> Tensor:
        return torch.randint(-rows if bad else 0, 3 * rows if bad else rows, shape, generator=draw)

    def ragged() -> tuple[Tensor, Tensor]:
        lengths = torch.randint(0, 4, (size,), generator=draw)
        return ids(40, int(lengths.sum())), lengths

    found = {"user": ids(50, size, 1), "tags": ids(30, size, 3), "seen": ragged(), "rated": ragged()}
    return torch.randn(size, 2, generator=draw), found


def jagged(ids: Mapping[str, Any]) -> Jagged:
    return Jagged.from_dict({n: (of[0], offsets_of(of[1])) if isinstance(of, tuple) else of for n, of in ids.items()})


def model_of(kind: str, on_bad_id: OnBadId = "error") -> nn.Module:
    torch.manual_seed(1)
    tables = [
        Table("user", 50, 16),
        Table("tags", 30, 16, dtype="int8"),
        Table("seen", 40, 16, dtype="bf16", fp32_rows=9),
    ]
    given: Any = {"tables": tables, "features": SCHEMA.features(on_bad_id), "dense_features": 2}
    return (DLRM(**given, bottom=[16], top=[8, 1]) if kind == "DLRM" else WideDeep(**given, top=[8, 2])).eval()


@pytest.mark.parametrize("kind", ["DLRM", "WideDeep"])
@pytest.mark.parametrize("on_bad_id", ["error", "hash", "drop"])
def test_a_program_gives_the_logits_of_the_model(kind: str, on_bad_id: OnBadId) -> None:
    model = model_of(kind, on_bad_id)
    batches = [inputs(size, bad=on_bad_id != "error") for size in (1, 4, 9)]
    with torch.no_grad():
        expected = [model(Batch(sparse=jagged(ids), dense=dense)) for dense, ids in batches]
    program = trace_whole(plain_model(model), SCHEMA).module()
    for (dense, ids), logits in zip(batches, expected, strict=True):
        torch.testing.assert_close(program(dense, ids), logits, rtol=1e-5, atol=1e-6)


def test_tables_are_the_same_bits() -> None:
    model = model_of("DLRM")
    tables = {name: model.embeddings.weight(name).clone() for name in model.embeddings.tables}
    plain = plain_model(model)
    for (name, table), module in zip(tables.items(), plain.model.embeddings.tables, strict=True):
        assert torch.equal(module.weight, table), name
    assert isinstance(module, nn.EmbeddingBag)


def test_a_model_without_dense_inputs() -> None:
    schema = Schema(sparse=(SparseColumn(name="user", rows=50), SparseColumn(name="item", rows=30)))
    model = DLRM(schema.tables(8), schema.features(), 0, bottom=[8], top=[4, 1]).eval()
    ids = {"user": torch.tensor([[3], [49], [0]]), "item": torch.tensor([[3], [29], [0]])}
    with torch.no_grad():
        expected = model(Batch(sparse=Jagged.from_dict(ids)))
    program = trace_whole(plain_model(model), schema).module()
    torch.testing.assert_close(program(None, ids), expected)
    torch.testing.assert_close(program(None, {name: of[:1] for name, of in ids.items()}), expected[:1])


class ByValue(nn.Module):
    """A model that looks at its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(SCHEMA.tables(8), SCHEMA.features())

    def forward(self, batch: Batch) -> Tensor:
        e = self.embeddings(batch.sparse)
        return e["user"] if float(e["user"].sum()) > 0 else e["tags"]


def test_what_cannot_be_exported_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"ByValue cannot be traced: .*must not branch on values"):
        trace_whole(plain_model(ByValue()), SCHEMA)
    quoted = Schema(sparse=(SparseColumn(name="it's", rows=50),))
    with pytest.raises(CheckpointError, match=r"got column \"it's\", expected no quote"):
        trace_whole(plain_model(model_of("DLRM")), quoted)
    feature = Feature("f", "t", pooling="none")
    with pytest.raises(SpecError, match=r"feature 'f': max_len: got none with pooling 'none'"):
        plain_model(nn.Sequential(EmbeddingCollection([Table("t", 9, 8)], [feature])))


HISTORIES = Schema(
    sparse=(
        SparseColumn(name="user", rows=50, weights="share"),
        SparseColumn(name="item", rows=40),
        SparseColumn(name="history", rows=40, table="item", ids=None, weights="times"),
    ),
    dense=("x", "y"),
)


def histories(size: int, *, bad: bool = False, longest: int = 7) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """Numbers, ids and weights; some histories have no id, some more than 4."""
    draw = torch.Generator().manual_seed(size)
    low, high = (-1, 2) if bad else (0, 1)

    def ids(rows: int, *shape: int) -> Tensor:
        return torch.randint(low * rows, high * rows, shape, generator=draw)

    lengths = torch.randint(0, longest + 1, (size,), generator=draw)
    n = int(lengths.sum())
    found = {"user": ids(50, size, 1), "item": ids(40, size, 1), "history": (ids(40, n), lengths)}
    weights = {"user": torch.randn(size, 1, generator=draw), "history": torch.randn(n, generator=draw)}
    return torch.randn(size, 2, generator=draw), found, weights


def scored(model: nn.Module, dense: Tensor | None, ids: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Tensor:
    given = Jagged.from_dict(jagged(ids).to_dict(), weights) if weights else jagged(ids)
    with torch.no_grad():
        return model(Batch(sparse=given, dense=dense))


OF_ONE = Schema(sparse=(HISTORIES.sparse[1], replace(HISTORIES.sparse[2], weights=None)))


@pytest.mark.parametrize("on_bad_id", ["error", "hash", "drop"])
@pytest.mark.parametrize("kind", ["DIN", "SASRec", "HSTU"])
def test_models_of_histories(kind: str, on_bad_id: OnBadId) -> None:
    """Of their newest ids, with histories that are empty or too long, and any ids."""
    torch.manual_seed(2)
    schema = HISTORIES if kind == "DIN" else OF_ONE
    given: Any = {"tables": schema.tables(16), "features": schema.features(on_bad_id), "max_len": 4}
    if kind == "DIN":
        model: nn.Module = DIN(**given, dense_features=2, histories={"history": "item"}, top=[8, 2])
    else:
        model = getattr(hb.nn, kind)(**given, history="history", item="item", heads=2)
    for parameter in model.parameters():  # zeros at first say nothing
        nn.init.normal_(parameter, std=0.5)
    batches = [histories(size, bad=on_bad_id != "error") for size in (1, 5, 30)]
    batches.append(histories(3, longest=0))  # nobody has a history
    if kind != "DIN":
        batches = [(None, {name: ids[name] for name in ("item", "history")}, {}) for _, ids, _ in batches]
    expected = [scored(model.eval(), *batch) for batch in batches]
    program = trace_whole(plain_model(model), schema).module()
    for batch, logits in zip(batches, expected, strict=True):
        given = batch if batch[2] else batch[:2]
        torch.testing.assert_close(program(*given), logits, rtol=1e-5, atol=1e-6)


class Vectors(nn.Module):
    """All vectors of a feature and its mask, or its pooled one."""

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection([Table("item", 40, 16)], [feature])

    def forward(self, batch: Batch) -> Tensor:
        (feature,) = self.embeddings.features
        found = self.embeddings(batch.sparse)
        if feature.is_pooled:
            return found["history"]
        vectors, mask = found.padded("history")
        return torch.cat([vectors.flatten(1), mask.to(vectors.dtype)], dim=1)


@pytest.mark.parametrize("on_too_long", ["truncate", "keep_last", "error"])
@pytest.mark.parametrize(
    ("pooling", "padding"), [("none", None), ("none", "left"), ("none", "right"), ("sum", None), ("mean", None)]
)
def test_vectors_of_features_with_a_limit_are_the_same_bits(pooling: Any, on_too_long: Any, padding: Any) -> None:
    for on_bad_id in ("error", "drop", "hash"):
        feature = Feature(
            "history", "item", pooling, max_len=4, on_too_long=on_too_long, on_bad_id=on_bad_id, padding=padding
        )
        schema, model = Schema(sparse=(HISTORIES.sparse[2],)), Vectors(feature)
        _, ids, weights = histories(30, bad=on_bad_id != "error", longest=4 if on_too_long == "error" else 7)
        given = {"history": ids["history"]}, {"history": weights["history"]}
        expected = scored(model, None, *given)
        program = trace_whole(plain_model(model), schema).module()
        found = program(None, *given)
        assert torch.equal(found, expected) if pooling == "none" else torch.allclose(found, expected, atol=1e-6)
        if on_too_long == "error":
            with pytest.raises(RuntimeError, match="feature 'history' has a sample of more than 4 ids"):
                program(
                    None,
                    {"history": (torch.zeros(5, dtype=torch.int64), torch.tensor([5]))},
                    {"history": torch.ones(5)},
                )
