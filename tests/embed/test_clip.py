"""Protects: gradients of parameters and tables are clipped together, by the norm of torch, in every plan."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import hotbed as hb
from hotbed import torch_hooks
from hotbed.embed.lookup_gradients import sum_squares
from hotbed.errors import NonFiniteError, OptimizerError, SpecError
from hotbed.ops import Occurrences
from hotbed.ops.exact_sum import float_of, sums_of
from tests.ranks import Ranks

ROWS, DIM = 40, 48


class Net(nn.Module):
    """Bags with ids that come again, in a bag and in another feature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bags = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.one = nn.Embedding(ROWS, DIM)
        self.other = nn.Embedding(ROWS, DIM)
        self.other.weight = self.one.weight
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.bags(ids) + self.one(ids[:, 0]) * self.other(ids[:, 1]))


def make() -> Any:
    return Net()


def ids(seed: int, samples: int = 24) -> Tensor:
    return torch.randint(0, 6, (samples, 4), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor) -> Tensor:
    return 30 * logits.square().mean()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_norm_and_rows_are_those_of_torch(accumulate: int, max_norm: float) -> None:
    theirs, ours = make(), hb.swap_embeddings(make())
    lr = 0.1 if max_norm < 1 else 0.001  # unclipped gradients at 0.1 make weights diverge, which amplifies rounding
    dense = torch.optim.SGD(theirs.parameters(), lr=lr)
    optimizers = [torch.optim.SGD(ours.parameters(), lr=lr), hb.optim.SGD(ours, lr=lr)]
    for step in range(3):
        for part in range(accumulate):
            for model in (theirs, ours):
                loss_of(model(ids(step * 7 + part))).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        found = hb.clip_grad_norm_(ours, max_norm)
        assert found.dtype == torch.float32 and found.shape == ()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        for optimizer in (dense, *optimizers):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)


def test_clipping_twice_and_dropping_start_anew() -> None:
    model = hb.swap_embeddings(make())
    tables = hb.optim.SGD(model, lr=0.1)
    loss_of(model(ids(1))).backward()
    norm = hb.clip_grad_norm_(model, 1e9)
    assert float(norm) > 10
    hb.clip_grad_norm_(model, 2.0)
    assert float(hb.clip_grad_norm_(model, 1.0)) == pytest.approx(2, rel=1e-5)
    with pytest.raises(OptimizerError, match="arrived after clip_grad_norm_: got another backward"):
        loss_of(model(ids(1))).backward()
    model.zero_grad()
    loss_of(model(ids(1))).backward()
    assert torch.equal(hb.clip_grad_norm_(model, 1e9), norm)
    tables.zero_grad()
    model.zero_grad()
    loss_of(model(ids(1))).backward()
    assert torch.equal(hb.clip_grad_norm_(model, 1e9), norm)


def test_only_what_is_trained_counts() -> None:
    theirs, ours = make(), hb.swap_embeddings(make())
    for model in (theirs, ours):
        model.one.requires_grad_(False)
    kept = [hb.optim.SGD(hb.optim.TableSelection(ours, [n]), lr=1.0) for n in ("bags.rows.bags", "one.rows.one")]
    for model in (theirs, ours):
        loss_of(model(ids(2))).backward()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.testing.assert_close(hb.clip_grad_norm_(ours, 1.0), expected, rtol=1e-6, atol=0)
    del kept


@pytest.mark.parametrize("unscale", [True, False])
def test_with_a_grad_scaler_the_norm_is_that_of_what_is_unscaled(unscale: bool) -> None:
    rows = []
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        model = hb.swap_embeddings(make())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), hb.optim.SGD(model, lr=0.1)]
        for step in range(2):
            scaler.scale(loss_of(model(ids(step)))).backward()
            for optimizer in optimizers if unscale else ():
                scaler.unscale_(optimizer)
            factor = 1.0 if unscale else scaler.get_scale()
            norm = hb.clip_grad_norm_(model, 0.5 * factor)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            rows.append((norm / factor, model.state_dict()))
    for (norm, state), (expected, of_plain) in zip(rows[2:], rows[:2], strict=True):
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(state, of_plain, rtol=1e-5, atol=1e-6)


def clipped(group: ProcessGroup | None, plan: Any, dense: str, options: dict[str, Any]) -> tuple[list[float], Any]:
    """Train with clipped gradients; norms of all steps, and the rows and parameters."""
    model: Any = hb.swap_embeddings(make())
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    if group is not None:
        model = hb.distribute(model, plan, hb.ParallelOptions(dense=dense, **options))  # pyright: ignore[reportArgumentType]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), hb.optim.RowWiseAdagrad(model, lr=0.1)]
    norms = []
    for step in range(3):
        loss_of(model(ids(step)[rank::size])).backward()
        norms.append(float(hb.clip_grad_norm_(model, 0.5)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms, {name: t.clone() for name, t in model.state_dict().items()}


PLANS = ["table", "row", "column", "grid", "dp", {"bags": hb.Cut(rows=3, cols=2, hot_rows=4), "one": "table"}]


def test_all_plans_of_ranks_have_the_same_bits(ranks: Ranks) -> None:
    alone, rows = clipped(None, "table", "ddp", {})
    first, *others = [found for plan in PLANS for found in ranks.run(3, clipped, plan, "ddp", {})]
    assert first[0] == pytest.approx(alone, rel=1e-5)
    torch.testing.assert_close(first[1], rows, rtol=1e-4, atol=1e-5)
    for norms, state in others:
        assert norms == first[0]
        assert all(torch.equal(t, first[1][name]) for name, t in state.items())


@pytest.mark.parametrize(("dense", "options"), [("fsdp", {}), ("ddp", {"replicas": 2, "exact": True})])
def test_shards_of_parameters_and_copies_of_tables_count_once(
    ranks: Ranks, dense: str, options: dict[str, Any]
) -> None:
    alone, rows = clipped(None, "table", "ddp", {})
    found = ranks.run(4, clipped, "row", dense, options)
    for norms, state in found:
        assert norms == found[0][0] == pytest.approx(alone, rel=1e-5)
        torch.testing.assert_close(state, rows, rtol=1e-4, atol=1e-5)


def averaged(group: ProcessGroup) -> None:
    model = hb.distribute(hb.swap_embeddings(make()), "row", hb.ParallelOptions(replicas=2))
    with pytest.raises(SpecError, match=r"got 2 averaged replicas, expected exact replicas"):
        hb.clip_grad_norm_(model, 1.0)


def test_replicas_that_are_averaged_are_refused(ranks: Ranks) -> None:
    ranks.run(4, averaged)


def test_arguments_that_cannot_be() -> None:
    model: Any = hb.swap_embeddings(make())
    wrong: list[tuple[Any, ...]] = [(model.parameters(), 1.0), (model, 1.0, math.inf), (model, -1.0), (model, math.nan)]
    for arguments, message in zip(wrong, ["generator", "norm_type inf", "got -1.0", "got nan"], strict=True):
        with pytest.raises(SpecError, match=message):
            hb.clip_grad_norm_(*arguments)
    kept = hb.optim.SGD(model, lr=0.1)
    with pytest.raises(SpecError, match="SGD trains tables of a larger model"):
        hb.clip_grad_norm_(model.bags, 1.0)
    kept.in_backward()
    with pytest.raises(OptimizerError, match=r"got SGD.in_backward\(\)"):
        hb.clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("where", ["table", "parameter"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_that_are_not_finite(where: str, value: float) -> None:
    theirs, ours = make(), hb.swap_embeddings(make())
    kept = hb.optim.SGD(ours, lr=1.0)
    for model in (theirs, ours):
        looked_up = model.one(torch.tensor([1])) if where == "table" else model.top.bias
        (looked_up * value).sum().backward()
    with pytest.raises(NonFiniteError, match=f"got {value}"):
        hb.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    expected = float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))
    assert str(float(hb.clip_grad_norm_(ours, 1.0))) == str(expected) == str(value)
    del kept


def test_models_without_tables_or_gradients() -> None:
    plain = nn.Linear(3, 2)
    assert float(hb.clip_grad_norm_(plain, 1.0)) == 0
    plain(torch.ones(1, 3)).sum().backward()
    other = copy.deepcopy(plain)
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        q.grad = p.grad.clone()  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(hb.clip_grad_norm_(plain, 1.0), nn.utils.clip_grad_norm_(other.parameters(), 1.0))
    torch.testing.assert_close(plain.weight.grad, other.weight.grad)


def test_sums_do_not_round() -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.rand(1000, generator=draw) * 10.0 ** torch.randint(-44, 38, (1000,), generator=draw)
    expected = math.fsum(values.double().tolist())
    for order in (values, values.flip(0), values.sort().values):
        assert float_of((sums_of(order[:300]) + sums_of(order[300:])).tolist()) == expected
    tiny = torch.tensor([2.0**-149, 0.0, 2.0**127])
    assert float_of(sums_of(tiny).tolist()) == math.fsum(tiny.double().tolist())
    assert float_of(sums_of(torch.tensor([1.0, math.inf])).tolist()) == math.inf
    assert math.isnan(float_of(sums_of(torch.tensor([math.inf, math.nan])).tolist()))


@pytest.mark.parametrize("swapped", [True, False])
def test_clipping_by_torch_warns_once(swapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_hooks, "_warned_of", set[str]())
    model: Any = nn.ModuleDict({"part": nn.ModuleDict({"net": hb.swap_embeddings(make()) if swapped else make()})})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        list(model.parameters())
        for _ in range(2):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert [str(w.message).split(" does not")[0] for w in found] == ["torch.nn.utils.clip_grad_norm_"] * swapped
    assert all(w.filename == __file__ for w in found)


def test_rows_that_are_padding_do_not_count() -> None:
    """As on a GPU, where gradients are summed into more rows than there are slots."""
    tables = hb.EmbeddingCollection(
        [hb.Table("a", 5, 16), hb.Table("b", 3, 16)], [hb.Feature("a", "a"), hb.Feature("b", "b")]
    )
    (arena,) = tables._groups[0].arenas
    slots, sums = torch.tensor([4, 5, 8, 8]), torch.ones(4, 16)
    sums[2:] = math.nan
    found = sum_squares(arena, Occurrences(slots, torch.arange(4), None), sums, {"b"}, torch.tensor(0.5))
    assert float_of(found.tolist()) == 16 * 0.25


def test_tables_without_an_optimizer_are_refused() -> None:
    model = hb.EmbeddingCollection([hb.Table("t", 10, 4)], [hb.Feature("f", "t")])
    model(hb.Jagged.from_dict({"f": torch.tensor([[1], [2]])}))["f"].sum().backward()
    with pytest.raises(OptimizerError, match=r"\('t'\) would be lost: got clip_grad_norm_"):
        hb.clip_grad_norm_(model, 1.0)
