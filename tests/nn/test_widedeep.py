from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from hotbed.batch import Batch
from hotbed.embed import plan_for
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn import WideDeep
from hotbed.optim import FTRL, Adagrad, RowWiseAdagrad
from hotbed.specs import Feature, Table
from tests.embed.collection_cases import FEATURES, TABLES, expected, ids
from tests.ranks import Ranks

from .parity import Weights, assert_parity, mlp, pooled

DENSE = 2
WIDTH = 8 + 3 + 8 + 8  # of the features: user, text (words), item, history


def make(labels: int = 1, *, wide_weights: bool = True, **options) -> WideDeep:
    torch.manual_seed(1)
    model = WideDeep(TABLES, FEATURES, DENSE, top=(16, labels), **options)
    if wide_weights:
        for table in model.wide.tables:
            model.wide.weight(table).normal_()
    return model


def batch(size: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(2)
    return Batch(sparse=ids(size), dense=torch.randn(size, DENSE, generator=draw))


def plain(model: WideDeep, given: Batch) -> Tensor:
    """The logits from the tables' weights, in plain PyTorch."""
    assert given.dense is not None
    deep = expected(model.embeddings, given.sparse)
    wide = expected(model.wide, given.sparse)
    inputs = torch.cat([*(deep[f.name] for f in FEATURES), given.dense], dim=1)
    return model.top(inputs) + torch.stack([wide[f.name] for f in FEATURES]).sum(0)


@pytest.mark.parametrize("labels", [1, 3])
def test_logits_are_those_of_plain_pytorch(labels: int) -> None:
    model = make(labels)
    assert [p.shape for p in model.top.parameters() if p.dim() == 2] == [(16, WIDTH + DENSE), (labels, 16)]
    logits = model(batch())
    assert logits.shape == (6, labels)
    torch.testing.assert_close(logits, plain(model, batch()))
    assert not torch.allclose(logits, plain(make(labels, wide_weights=False), batch()))


def formula(weights: Weights, of: Batch) -> Tensor:
    """Sections 3.1 to 3.3: an MLP over vectors and numbers side by side, plus the weights of all ids."""
    fields = {"user": "users", "item": "items", "bought": "items"}
    deep = [pooled(of, name, weights[f"embeddings.{table}"]) for name, table in fields.items()]
    wide = [pooled(of, name, weights[f"wide.{table}"]) for name, table in fields.items()]
    numbers = [] if of.dense is None else [of.dense.double()]
    return mlp(torch.cat([*deep, *numbers], dim=1), weights, "top", 2) + torch.stack(wide).sum(0)


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("dense", [0, 2])
def test_logits_and_gradients_are_those_of_the_formula(labels: int, dense: int) -> None:
    draw = torch.Generator().manual_seed(0)
    given = {
        "user": torch.randint(0, 9, (11,), generator=draw),
        "item": torch.randint(0, 12, (11,), generator=draw),
        "bought": [torch.randint(0, 12, (i % 4,), generator=draw).tolist() for i in range(11)],
    }
    numbers = torch.randn(11, dense, generator=draw) if dense else None
    features = [Feature("user", "users"), Feature("item", "items"), Feature("bought", "items")]
    model = WideDeep([Table("users", 9, 4), Table("items", 12, 8)], features, dense, top=(8, labels))
    assert_parity(model, formula, Batch(sparse=Jagged.from_dict(given), dense=numbers))


def test_the_published_shapes_are_the_default() -> None:
    tables = [Table(f"t{i}", rows=10, dim=128) for i in range(26)]
    model = WideDeep(tables, [Feature(f"C{i}", table=f"t{i}") for i in range(26)])
    shapes = [list(p.shape) for p in model.parameters() if p.dim() == 2]
    assert shapes == [[1024, 26 * 128 + 13], [1024, 1024], [512, 1024], [256, 512], [1, 256]]
    assert {table.dim for table in model.wide.tables.values()} == {1}


def test_wide_tables_are_zeros_in_float32_with_the_rows_of_the_deep_ones() -> None:
    tables = [replace(TABLES[0], dtype="int8", fp32_rows=3), replace(TABLES[1], frozen=True), TABLES[2]]
    model = WideDeep(tables, FEATURES, DENSE, top=(16, 3))
    assert list(model.wide.tables.values()) == [
        Table("users", rows=50, dim=3, init_bound=0.0),
        Table("items", rows=30, dim=3, init_bound=0.0, frozen=True),
        Table("words", rows=20, dim=3, init_bound=0.0),
    ]
    assert model.wide.features == model.embeddings.features == tuple(FEATURES)
    assert not any(model.wide.weight(table).any() for table in model.wide.tables)
    assert {name: handle.requires_grad for name, handle in model.wide.handles.items()} == {
        "users": True,
        "items": False,
        "words": True,
    }


def test_per_id_weights_count_in_both_parts() -> None:
    model = WideDeep([Table("t", rows=5, dim=4)], [Feature("f", table="t")], 0, top=(1,))
    model.wide.weight("t").copy_(torch.arange(5.0)[:, None])
    weights = torch.tensor([2.0, -1.0, 0.5])
    entry = (torch.tensor([1, 4, 3]), torch.tensor([0, 2, 3]))
    logits = model(Batch(sparse=Jagged.from_dict({"f": entry}, {"f": weights})))
    rows = model.embeddings.weight("t")
    deep = model.top(torch.stack([2 * rows[1] - rows[4], 0.5 * rows[3]]))
    torch.testing.assert_close(logits, deep + torch.tensor([[2.0 - 4.0], [1.5]]))


# -- optimizers ----------------------------------------------------------------------------------------------------


def tables_of(model: WideDeep) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items() if not name.startswith("top.")}


def changed(model: WideDeep, before: dict[str, Tensor]) -> set[str]:
    """The collections in which some row is another one now."""
    return {name.split(".")[0] for name, t in tables_of(model).items() if not torch.equal(t, before[name])}


def test_each_optimizer_trains_its_own_tables() -> None:
    model = make(wide_weights=False)
    deep, wide = RowWiseAdagrad(model.embeddings, lr=0.1), FTRL(model.wide, lr=0.1)
    for optimizer, name in ((deep, "embeddings"), (wide, "wide")):
        before = tables_of(model)
        model(batch()).square().sum().backward()
        optimizer.step()
        assert changed(model, before) == {name}
        deep.zero_grad()
        wide.zero_grad()


@pytest.mark.parametrize(("wide_lr", "trained"), [(0.1, {"embeddings", "wide"}), (0.0, {"embeddings"})])
def test_one_optimizer_may_train_both(wide_lr: float, trained: set[str]) -> None:
    model = make()
    groups = [{"tables": ["wide.users", "wide.items", "wide.words"], "lr": wide_lr}]
    optimizer, before = Adagrad(model, lr=0.1, groups=groups), tables_of(model)
    model(batch()).sum().backward()
    optimizer.step()
    assert changed(model, before) == trained


def test_the_first_step_of_ftrl_is_its_formula() -> None:
    """From 0, with g the gradient of a row's one weight: z = g and n = g², so w = −lr · g / (β + |g|)."""
    model = make(wide_weights=False)
    wide = FTRL(model.wide, lr=0.3, beta=0.5)
    given = batch()
    weight = model.wide.weight("items").clone().requires_grad_()
    ids_of = given.sparse["item"].values, given.sparse["history"].values.view(6, 3)
    linear = weight[ids_of[0]] + weight[ids_of[1]].sum(1)
    others = model(given).detach()
    (others + linear).square().sum().backward()
    model(given).square().sum().backward()
    wide.step()
    g = weight.grad
    assert g is not None
    assert 0 < (g != 0).sum() < len(g)
    torch.testing.assert_close(model.wide.weight("items"), -0.3 * g / (0.5 + g.abs()))


# -- batches -------------------------------------------------------------------------------------------------------


def test_an_empty_batch_changes_nothing() -> None:
    model = make()
    optimizers = [RowWiseAdagrad(model.embeddings, lr=0.1), FTRL(model.wide, lr=0.1)]
    before = tables_of(model)
    empty = {"user": torch.empty(0, dtype=torch.int64), "item": torch.empty(0, dtype=torch.int64), "text": []}
    sparse = Jagged.from_dict({**empty, "history": torch.empty(0, 3, dtype=torch.int64)})
    logits = model(Batch(sparse=sparse, dense=torch.empty(0, DENSE)))
    assert logits.shape == (0, 1)
    logits.sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert changed(model, before) == set()


def test_it_needs_no_dense_inputs() -> None:
    model = WideDeep(TABLES, FEATURES, 0, top=(4, 1))
    logits = model(Batch(sparse=ids()))
    assert logits.shape == (4, 1)
    assert torch.equal(logits, model(Batch(sparse=ids(), dense=torch.empty(4, 0))))


@pytest.mark.parametrize(("dense", "got"), [(None, "0"), (torch.rand(4, 3), "3")])
def test_dense_inputs_must_fit(dense: Tensor | None, got: str) -> None:
    with pytest.raises(BatchError, match=f"WideDeep: dense inputs of the batch: got {got}, expected 2"):
        make()(Batch(sparse=ids(), dense=dense))


def test_under_autocast_the_deep_part_is_computed_in_its_dtype_and_the_wide_part_in_float32() -> None:
    model, seen = make(), []
    model.top.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    exact = model(batch())
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(batch())
    assert seen == [torch.float32, torch.bfloat16]
    assert exact.dtype == rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    last = model.top[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.zero_()
        last.bias.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        wide = model(batch())
    assert torch.equal(wide, model(batch()))
    assert not torch.equal(wide, wide.bfloat16().float())


# -- what it cannot be made of -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ((), "got no widths, expected at least one, the number of labels"),
        ((8, 0), "WideDeep: last width of top: got 0, expected at least 1 and at most 1,024"),
        ((8, 2000), "WideDeep: last width of top: got 2,000, expected at least 1 and at most 1,024"),
        ((0, 1), r"got inputs 29 and widths \[0, 1\], expected positive inputs"),
    ],
)
def test_top_must_end_with_the_number_of_labels(top: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        WideDeep(TABLES, FEATURES, DENSE, top=top)


def test_features_must_be_pooled_and_have_tables() -> None:
    with pytest.raises(SpecError, match="got 'none', expected 'sum' or 'mean'"):
        WideDeep(TABLES, [replace(FEATURES[0], pooling="none"), *FEATURES[1:]], DENSE)
    with pytest.raises(
        SpecError, match=r"feature 'f': table: got 'itms', expected one of users, items, words.*did you mean 'items'"
    ):
        WideDeep(TABLES, [*FEATURES, Feature("f", table="itms")], DENSE)


# -- several ranks -------------------------------------------------------------------------------------------------


def test_every_rank_has_the_whole_wide_part() -> None:
    plan = plan_for(make(), 2, "row")
    for name, tiles in plan.by_table.items():
        whole = len(tiles) == 1 and {tiles[0].owner, *tiles[0].readers} == {0, 1}
        assert whole == name.startswith("wide."), name


def trained(group: dist.ProcessGroup, scheme: str) -> dict[str, Tensor]:
    """Tables and parameters after three steps, of which a rank has 6, 0 or 2 samples."""
    torch.manual_seed(1)
    tables = [Table(t.name, rows=t.rows, dim=16) for t in TABLES]
    model = hb.distribute(WideDeep(tables, FEATURES, DENSE, top=(8, 1)), scheme, group=group)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    optimizers += [RowWiseAdagrad(model.embeddings, lr=0.1), FTRL(model.wide, lr=0.1, beta=0.0)]
    rank = dist.get_rank(group)
    for step in range(3):
        whole = Batch(sparse=ids(8, seed=step), dense=torch.ones(8, DENSE))
        own = whole.take(torch.arange(8)[[slice(6), slice(0), slice(6, 8)][rank]])
        for optimizer in optimizers:
            optimizer.zero_grad()
        target = torch.ones(len(own), 1)
        total = F.binary_cross_entropy_with_logits(model(own), target, reduction="sum")
        hb.mean_over_ranks(total, len(own), model).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def test_any_plan_gives_the_same_model_to_the_bit(ranks: Ranks) -> None:
    by_row, by_table = (ranks.run(3, trained, scheme) for scheme in ("row", "table"))
    assert by_row[0]["wide.items.weight"].any()
    for state in (*by_row[1:], *by_table):
        for name, tensor in by_row[0].items():
            assert torch.equal(state[name], tensor), name
