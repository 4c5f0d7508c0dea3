"""The canonical sum and the rules: what a step does to the rows it touches, and to no other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotbed.ops import Occurrences, RuleStep
from hotbed.ops.reference import block_sum
from hotbed.optim import SGD, RowWiseAdagrad, Rule

from .cases import CASES, DIMS, Kernels, embedding_bag, naive_block_sum, naive_sum, occurrences_of

RULES = {rule.name: rule for rule in (SGD.rule, RowWiseAdagrad.rule)}
CLOSE = {"rtol": 2e-6, "atol": 1e-6}
TABLES = [4, 5, 15]
SEGMENTS = {
    "single": list(range(23, 3, -1)),
    "one_row": [0] * 70,
    "at_run_length": [7] * 32 + [8] * 33 + [9] * 31 + [0],
    "two_runs_each": [i % 3 for i in range(3 * 40)],
    "over_1024": [2] * 1100 + [5] * 40 + [3, 23],
    "random": torch.randint(0, 24, (200,), generator=torch.Generator().manual_seed(3)).tolist(),
}


@dataclass(frozen=True)
class Arena:
    """An arena of some tables and what a step needs to know of them."""

    rule: Rule
    weight: Tensor
    moments: dict[str, Tensor]
    bases: Tensor
    hyper: Tensor

    @staticmethod
    def make(rule: Rule, dim: int, *, tables: list[int] = TABLES, active: tuple[int, ...] = (1, 1, 1)) -> Arena:
        gen = torch.Generator().manual_seed(0)
        slots = sum(tables)
        moments = {
            m.name: torch.rand((slots,) if m.per == "row" else (slots, dim), generator=gen) for m in rule.moments
        }
        hyper = torch.rand(len(tables), 1 + len(rule.hyper), generator=gen) * 0.1
        hyper[:, 0] = torch.tensor(active)
        bases = torch.tensor([0, *tables]).cumsum(0)[:-1]
        return Arena(rule, torch.randn(slots, dim, generator=gen), moments, bases, hyper)

    def updated(
        self, backend: Kernels, occurrences: Occurrences, grad: Tensor, *, inv_scale: float = 1.0, gate: object = True
    ) -> Arena:
        """The arena after the step; this one stays as it is."""
        arena, found = backend.put(self), backend.put(occurrences)
        step = RuleStep(
            rule=self.rule,
            bases=arena.bases,
            hyper=arena.hyper,
            inv_scale=backend.put(torch.tensor(inv_scale)),
            gate=backend.put(torch.tensor(gate)),
        )
        groups = backend.ops.group(found.slots)
        backend.ops.update(step, arena.weight, arena.moments, found, groups, backend.put(grad))
        return replace(arena, weight=arena.weight.cpu(), moments={k: v.cpu() for k, v in arena.moments.items()})

    def updated_naively(self, occurrences: Occurrences, grad: Tensor, *, inv_scale: float) -> Arena:
        """The same, one row after the other in numpy."""
        weight = self.weight.numpy().copy()
        moments = {name: m.numpy().copy() for name, m in self.moments.items()}
        for slot, total in naive_sum(occurrences, grad).items():
            g = total * np.float32(inv_scale)
            active, lr, *rest = self.hyper[int((self.bases <= slot).sum()) - 1].numpy()
            if not active:
                continue
            if self.rule.name == "rowwise_adagrad":
                moments["sum_of_squares"][slot] += naive_block_sum(g * g) / np.float32(len(g))
                lr = lr / (np.sqrt(moments["sum_of_squares"][slot]) + rest[0])
            weight[slot] -= lr * g
        return replace(
            self, weight=torch.from_numpy(weight), moments={k: torch.from_numpy(m) for k, m in moments.items()}
        )

    def rows(self, at: Tensor) -> list[Tensor]:
        return [self.weight[at], *(m[at] for m in self.moments.values())]


ALL = torch.arange(sum(TABLES))
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def gradient(bags: int, dim: int) -> Tensor:
    return torch.randn(bags, dim, generator=torch.Generator().manual_seed(9))


def assert_same(a: Arena, b: Arena, at: Tensor = ALL) -> None:
    """Bit for bit, in these rows."""
    for x, y in zip(a.rows(at), b.rows(at), strict=True):
        assert torch.equal(x, y)


@every_rule
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", SEGMENTS)
def test_update(backend, name, dim, rule):
    before = Arena.make(rule, dim, active=(1, 0, 1))
    occurrences = occurrences_of(SEGMENTS[name], 12, scaled=name in ("random", "at_run_length"))
    after = before.updated(backend, occurrences, gradient(12, dim), inv_scale=0.3)
    expected = before.updated_naively(occurrences, gradient(12, dim), inv_scale=0.3)
    for x, y in zip(after.rows(ALL), expected.rows(ALL), strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@every_rule
@pytest.mark.parametrize("name", ["random", "over_1024"])
def test_update_twice_gives_the_same_bits(backend, name, rule):
    before, occurrences = Arena.make(rule, 40), occurrences_of(SEGMENTS[name], 12, scaled=True)
    first, second = (before.updated(backend, occurrences, gradient(12, 40)) for _ in range(2))
    assert_same(first, second)


@every_rule
def test_update_touches_only_rows_that_occur_in_active_tables(backend, rule):
    before = Arena.make(rule, 17, active=(1, 0, 1))
    after = before.updated(backend, occurrences_of([0, 2, 2, 5, 8, 23], 4, scaled=False), gradient(4, 17))
    touched = torch.tensor([0, 2, 23])
    rest = torch.tensor([i for i in range(24) if i not in (0, 2, 23)])
    assert_same(after, before, rest)
    for x, y in zip(after.rows(touched), before.rows(touched), strict=True):
        assert (x != y).flatten(1).any(1).all() if x.dim() > 1 else (x != y).all()


@every_rule
@pytest.mark.parametrize("gate", [False, 0.0])
def test_closed_gate_touches_nothing(backend, rule, gate):
    before = Arena.make(rule, 16)
    grad = torch.full((4, 16), torch.nan)
    assert_same(before.updated(backend, occurrences_of([1] * 70 + [3], 4, scaled=False), grad, gate=gate), before)


@every_rule
def test_no_occurrences(backend, rule):
    before = Arena.make(rule, 16)
    assert_same(before.updated(backend, occurrences_of([], 4, scaled=False), gradient(4, 16)), before)


def test_every_row_has_the_hyperparameters_of_its_table(backend):
    tables = [1, 2, 1, 3, 1] * 9
    before = replace(
        Arena.make(SGD.rule, 1, tables=tables, active=(1,) * 45),
        hyper=torch.stack([torch.ones(45), torch.arange(45.0)], dim=1),
    )
    slots = list(range(sum(tables)))
    after = before.updated(backend, occurrences_of(slots, 1, scaled=False), torch.ones(1, 1))
    steps = torch.repeat_interleave(torch.arange(45.0), torch.tensor(tables))
    torch.testing.assert_close(before.weight[:, 0] - after.weight[:, 0], steps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.batch])
def test_update_is_the_gradient_of_lookup(backend, name):
    """SGD with lr 1 subtracts what autograd finds for embedding_bag."""
    case = CASES[name]
    bags = case.layout()
    weight = torch.randn(case.slots, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight.requires_grad_()
    grad = gradient(case.batch * len(case.features), 3)
    embedding_bag(weight, bags).backward(grad.double().view(case.batch, -1, 3))
    before = replace(
        Arena.make(SGD.rule, 3, tables=case.tables, active=(1,) * len(case.tables)),
        weight=torch.zeros(case.slots, 3),
        hyper=torch.ones(len(case.tables), 2),
    )
    found = backend.ops.occurrences(backend.put(bags))
    after = before.updated(backend, found, grad)
    torch.testing.assert_close(-after.weight, weight.grad.float(), rtol=1e-5, atol=1e-5)


@every_rule
@settings(max_examples=15)
@given(
    slots=st.lists(st.sampled_from([0, 3, 4, 11, 23]), min_size=1, max_size=120),
    others=st.lists(st.sampled_from([1, 5, 12, 22]), max_size=60),
    seed=st.integers(0, 1000),
)
def test_a_row_does_not_depend_on_the_other_rows_of_the_batch(backend, rule, slots, others, seed):
    """The canonical sum of a slot is a function of its own occurrences: others between them change no bit."""
    before = Arena.make(rule, 20)
    alone = occurrences_of(slots, 12, scaled=True, seed=seed)
    extra = occurrences_of(others, 12, scaled=True, seed=seed + 1)
    mixed = torch.randperm(len(slots) + len(others), generator=torch.Generator().manual_seed(seed))
    # Keep the order of `slots` among themselves: only where the others fall between them is random.
    mixed[mixed < len(slots)] = torch.arange(len(slots))
    together = Occurrences(
        torch.cat([alone.slots, extra.slots])[mixed],
        torch.cat([alone.bags, extra.bags])[mixed],
        torch.cat([alone.scale, extra.scale])[mixed],
    )
    grad = gradient(12, 20)
    of_slots = torch.tensor(sorted(set(slots)))
    after = before.updated(backend, together, grad)
    assert_same(after, before.updated(backend, alone, grad), of_slots)
    untouched = torch.tensor([i for i in range(24) if i not in {*slots, *others}], dtype=torch.int64)
    assert_same(after, before, untouched)


@pytest.mark.parametrize("dim", [40, 128])
@pytest.mark.parametrize("cut", [16, 32])
def test_columns_cut_at_multiples_of_16_give_the_same_bits(backend, dim, cut):
    """SGD of two column tiles is SGD of the whole; a tile's Σg² is the whole's partials, added in column order."""
    occurrences = occurrences_of(SEGMENTS["random"], 12, scaled=True)
    grad = gradient(12, dim)
    halves = (slice(0, cut), slice(cut, dim))
    whole = Arena.make(SGD.rule, dim)
    parts = [replace(whole, weight=whole.weight[:, c].contiguous()) for c in halves]
    after = [part.updated(backend, occurrences, grad[:, c]) for part, c in zip(parts, halves, strict=True)]
    assert torch.equal(torch.cat([a.weight for a in after], dim=1), whole.updated(backend, occurrences, grad).weight)

    # With v₀ = 0 and 16 columns, 16 v is exactly the tile's block partial (a power of two rounds nothing).
    start = {"moments": {"sum_of_squares": torch.zeros(24)}}
    whole = replace(Arena.make(RowWiseAdagrad.rule, dim), **start)
    total = torch.zeros(24)
    for c in range(0, dim, 16):
        tile = replace(Arena.make(RowWiseAdagrad.rule, 16), **start)
        block = torch.zeros(12, 16)
        block[:, : min(16, dim - c)] = grad[:, c : c + 16]
        total = total + tile.updated(backend, occurrences, block).moments["sum_of_squares"] * 16
    v = whole.updated(backend, occurrences, grad).moments["sum_of_squares"]
    torch.testing.assert_close(v, total / dim, rtol=2e-7, atol=0)


@given(dim=st.integers(1, 200), seed=st.integers(0, 100))
def test_block_sum_of_a_column_tile_is_a_partial_of_the_whole(dim, seed):
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed))
    partials = [block_sum(x[:, c : c + 16]) for c in range(0, dim, 16)]
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    assert torch.equal(block_sum(x), total)
    assert block_sum(x).tolist() == [float(naive_block_sum(row)) for row in x.numpy()]
