"""Test every bit of a store: the contract of `hotbed.store.RowStore`.

::

    class TestMyStore(StoreContract):
        def make(self, spans, dim, dtype):
            return MyStore(spans, dim, dtype)

A store has 40 slots in two spans, for the 13 and 27 rows of two tables with ``dim`` columns. The fixture ``format``
returns each dtype, with and without float32 rows before the low-precision rows. Override this fixture to test fewer
formats.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hotbed.ops import BagLayout, RuleStep
from hotbed.ops import reference as oracle
from hotbed.ops.rows import MIN_EXPONENT
from hotbed.optim import Adam, Moment, RowWiseAdagrad, Rule
from hotbed.optim.sgd import PLAIN
from hotbed.specs import RowDtype
from hotbed.store import RowStore, Span

DIM = 130
"""Columns of the stores. An int8 row has two blocks, of 128 and 2 columns."""

SLOTS = 40
FIRST = (0, 13)
"""First slot of each span."""


class Format(NamedTuple):
    """Format of a store's rows."""

    dtype: RowDtype
    fp32_rows: tuple[int, int]  # number of float32 rows of each table

    @property
    def spans(self) -> list[Span]:
        """Spans of the two tables."""
        return [Span(13, self.fp32_rows[0]), Span(27, self.fp32_rows[1])]

    def narrow(self) -> Tensor:
        """Return a mask ``[40]`` of the slots with low-precision rows."""
        wide = [s.rows if self.dtype == "fp32" else s.fp32_rows for s in self.spans]
        return torch.tensor([row >= w for span, w in zip(self.spans, wide, strict=True) for row in range(span.rows)])

    def round(self, values: Tensor, slots: Tensor) -> Tensor:
        """Round float32 values to the precision of these slots, as if the rows were 0 before."""
        return torch.where(self.narrow()[slots, None], _round_to_nearest(values, self.dtype), values)


FORMATS = [Format(d, wide) for d in ("fp32", "bf16", "fp16", "int8", "fp8") for wide in ((0, 0), (5, 8))]
FORMATS.append(Format("int8", (0, 27)))
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
BYTES = {"fp32": 4 * DIM, "bf16": 2 * DIM, "fp16": 2 * DIM, "int8": DIM + 2, "fp8": DIM}
"""Bytes of a low-precision row."""
OWN: dict[str, list[float]] = {
    "sgd": [],
    "rowwise_adagrad": [1e-8, 0.0, 1.0, 0.0],
    "adam": [0.9, 0.99, 1e-8, 0.1, 0.01],
}
"""Hyperparameters in a first step that only one rule has, by rule."""


def _round_to_nearest(values: Tensor, dtype: RowDtype) -> Tensor:
    """Round float32 values to a dtype. The scale of an int8 block is the smallest power of two that fits its values."""
    if dtype != "int8":
        return values.to(FLOATS[dtype]).float()
    blocks: list[Tensor] = []
    for block in values.double().split(128, dim=1):
        largest = block.abs().amax(1, keepdim=True)
        quantum = 2.0 ** torch.ceil(torch.log2(largest / 127)).clamp(min=-120)
        blocks.append((block / quantum).round() * quantum)
    return torch.cat(blocks, dim=1).float()


def _spacing(values: Tensor, dtype: RowDtype) -> Tensor:
    """Return, for each value of a row ``[D]``, an upper limit of the distance to the next value of the dtype."""
    if dtype == "int8":
        return torch.cat([(2 / 127 * block.abs().amax()).expand(len(block)) for block in values.split(128)])
    digits, smallest = {"fp32": (21, 0.0), "bf16": (7, 0.0), "fp16": (10, 2**-24), "fp8": (3, 2**-9)}[dtype]
    return values.abs() * 2.0**-digits + smallest


def stored_bits(store: RowStore) -> list[bytes]:
    """Return the stored bytes of each slot's row."""
    out: list[bytes] = []
    for span in (0, 1):
        raw = {name: [bytes(row) for row in t.view(torch.uint8).cpu().numpy()] for name, t in store.raw(span).items()}
        out += raw.get("fp32_weight", [])
        out += map(bytes.__add__, raw["weight"], raw.get("exponents", [b""] * len(raw["weight"])))
    return out


class StoreContract:
    """Tests that every store must pass."""

    dim = DIM  # columns of the stores

    @pytest.fixture(params=FORMATS, ids=lambda f: f"{f.dtype}-{f.fp32_rows[0]}-{f.fp32_rows[1]}")
    def format(self, request: pytest.FixtureRequest) -> Format:
        """Return the format of this test."""
        return request.param

    @abstractmethod
    def make(self, spans: Sequence[Span], dim: int, dtype: RowDtype) -> Any:
        """Return an empty store with these spans."""

    def fill(self, format: Format, seed: int = 5, moments: bool = False) -> Any:
        """Return a store with random rows, drawn as if all slots were one table. ``moments`` adds two moments."""
        store = self.make(format.spans, self.dim, format.dtype)
        store.initialize(0, seed=seed, rows=range(SLOTS), cols=range(self.dim), bound=0.5)
        for moment in (Moment("row", "row"), Moment("element", "element")) if moments else ():
            store.add_moment(moment)
        return store

    @staticmethod
    def read_all(store: RowStore, moment: str | None = None) -> Tensor:
        """Return a CPU copy of all rows, or of a moment of all rows if ``moment`` names one."""
        return store.read(torch.arange(SLOTS, device=store.device), moment).cpu()

    @staticmethod
    def bags(store: RowStore, ids: list[list[int]], weights: list[float] | None = None) -> BagLayout:
        """Return the layout for a lookup of bags, pooled by sum, with one ragged feature per span.

        ``ids`` has the slots of each bag. All slots of a bag must be in one span.
        """
        lengths = [[len(bag) * (f == any(i >= 13 for i in bag)) for bag in ids] for f in (0, 1)]
        values = [[i - FIRST[f] for bag, n in zip(ids, lengths[f], strict=True) for i in bag[:n]] for f in (0, 1)]
        features = [[0, -1, 0, 0, 0, 0, 0], [len(values[0]), -1, 1, 13, 0, 1, 1]]
        return BagLayout(
            torch.tensor(values[0] + values[1], dtype=torch.int64, device=store.device),
            torch.tensor(features, device=store.device),
            torch.tensor([[0, *n] for n in lengths], device=store.device).cumsum(1),
            None if weights is None else torch.tensor(weights, device=store.device),
            len(ids),
            sum(map(len, ids)),
            False,
            width=2,
        )

    def pooled(
        self, store: RowStore, ids: list[list[int]], dtype: torch.dtype = torch.float32, weights: Any = None
    ) -> Tensor:
        """Look up the bags ``ids``, see `bags`. Return vectors ``[len(ids), 2, D]`` by bag and span, on the CPU."""
        out = torch.full((len(ids), 2, self.dim), torch.nan, dtype=dtype, device=store.device)
        store.lookup(self.bags(store, ids, weights), out)
        return out.cpu()

    def step(
        self,
        store: RowStore,
        rule: Rule,
        ids: list[list[int]],
        grad: Tensor,
        gate: float = 1.0,
        active: tuple[float, float] = (1.0, 1.0),
        seeds: tuple[int, int] = (3, 4),
    ) -> None:
        """Apply one step of a rule, with learning rate 0.1, to the bags ``ids``. ``grad`` has a row per bag.

        ``gate`` and ``seeds`` are as in `RuleStep`. ``active`` is 1 for each of the two tables to update, otherwise 0.
        """
        for moment in rule.moments:
            store.add_moment(moment)
        hyper = [[a, 0.1, torch.inf, torch.inf, 0.0, 0.0, *OWN[rule.name]] for a in active]
        tensors = {"hyper": hyper, "seeds": seeds, "inv_scale": 1.0, "gate": gate}
        on_device = {name: torch.tensor(values, device=store.device) for name, values in tensors.items()}
        step = RuleStep(rule=rule, uses=frozenset(), **on_device)
        store.update(step, store.occurrences(self.bags(store, ids)), grad.repeat_interleave(2, dim=0).to(store.device))

    # -- rows ------------------------------------------------------------------------------------------------------

    def test_initial_and_written_values_are_rounded_to_nearest(self, format: Format) -> None:
        store = self.make(format.spans, self.dim, format.dtype)
        cells = {"rows": range(3, 43, 2), "cols": range(16, 16 + self.dim)}
        store.initialize(2, seed=9, **cells, bound=0.25)
        expected = torch.zeros(SLOTS, self.dim)
        oracle.initial_values_(expected[2:22], seed=9, **cells, bound=0.25)
        expected = format.round(expected, torch.arange(SLOTS))
        assert torch.equal(self.read_all(store), expected)
        slots = torch.tensor([38, 2, 13, 12, 20])
        values = torch.randn(5, self.dim, generator=torch.Generator().manual_seed(1))
        values += values.sign()  # above the bound of initial values, because scales of int8 rows never shrink
        store.write(slots.to(store.device), values.to(store.device))
        expected[slots] = format.round(values, slots)
        assert torch.equal(self.read_all(store), expected)
        zeros = self.make(format.spans, self.dim, format.dtype)
        zeros.initialize(0, seed=1, rows=range(SLOTS), cols=range(self.dim), bound=0.0)
        assert not self.read_all(zeros).view(torch.int32).any()  # a zero must not have a sign

    def test_writing_or_putting_read_values_changes_no_bit(self, format: Format) -> None:
        store = self.fill(format, moments=True)
        store.write(torch.tensor([4], device=store.device), torch.ones(1, device=store.device), "row")
        before, slots = stored_bits(store), torch.tensor([30, 4, 13], device=store.device)
        every = torch.arange(SLOTS, device=store.device)
        store.write(every, store.read(every))
        assert stored_bits(store) == before
        values = store.values(slots)
        assert torch.equal(values.rows.cpu(), store.read(slots).cpu())
        assert {name: m.shape for name, m in values.moments.items()} == {"row": (3,), "element": (3, self.dim)}
        assert values.moments["row"].tolist() == [0.0, 1.0, 0.0]
        store.put(slots, values)
        assert stored_bits(store) == before
        store.put(slots, values._replace(moments={name: moment + 1 for name, moment in values.moments.items()}))
        assert stored_bits(store) == before
        assert self.read_all(store, "row")[[30, 4, 13, 5]].tolist() == [1.0, 2.0, 1.0, 0.0]
        assert self.read_all(store, "element").sum() == 3 * self.dim

    def test_scales_of_int8_rows_grow_to_put_scales(self, format: Format) -> None:
        store = self.fill(format)
        slots = torch.tensor([1, 12, 13, 30])
        here, narrow = slots.to(store.device), format.narrow()[slots]
        there = store.values(here)
        if format.dtype != "int8":
            assert there.scales is None
            return
        blocks = -(-self.dim // 128)
        least = torch.full((4, blocks), MIN_EXPONENT, dtype=torch.int8)
        assert torch.equal(there.scales.cpu()[~narrow], least[~narrow])
        assert (there.scales.cpu()[narrow] > MIN_EXPONENT).all()
        grown = there.scales + torch.tensor([[3, 0][:blocks]], dtype=torch.int8, device=store.device)
        rows = torch.randn(4, self.dim, generator=torch.Generator().manual_seed(1)) / 100
        store.put(here, there._replace(rows=rows.to(store.device), scales=grown))
        after = store.values(here).scales.cpu()
        assert torch.equal(after[narrow], grown.cpu()[narrow])
        assert torch.equal(after[~narrow], least[~narrow])
        quanta = torch.exp2(grown.cpu().double()).repeat_interleave(128, dim=1)[:, : self.dim]
        expected = torch.where(narrow[:, None], (rows.double() / quanta).round() * quanta, rows.double())
        assert torch.equal(store.read(here).cpu().double(), expected)

    def test_raw_has_the_stored_dtypes_and_loads_to_the_bit(self, format: Format) -> None:
        store, other = self.fill(format), self.fill(format, seed=6)
        assert store.to(store.device) is store
        assert not torch.equal(self.read_all(store), self.read_all(other))
        for span, (rows, wide, *_) in enumerate(format.spans):
            wide = 0 if format.dtype == "fp32" else wide
            dtype = torch.float32 if wide == rows else FLOATS.get(format.dtype, torch.int8)
            expected = {"weight": (dtype, (rows if wide == rows else rows - wide, self.dim))}
            if format.dtype == "int8" and wide < rows:
                expected["exponents"] = (torch.int8, (rows - wide, -(-self.dim // 128)))
            if 0 < wide < rows:
                expected["fp32_weight"] = (torch.float32, (wide, self.dim))
            assert {name: (t.dtype, tuple(t.shape)) for name, t in store.raw(span).items()} == expected
            other.load_raw(span, store.raw(span))
            last = FIRST[span] + rows
            assert torch.equal(self.read_all(store)[:last], self.read_all(other)[:last])
        assert stored_bits(store) == stored_bits(other)

    # -- lookups ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_lookup_pools_the_read_rows(self, format: Format, dtype: torch.dtype) -> None:
        store = self.fill(format)
        rows, expected = self.read_all(store), torch.zeros(3, 2, self.dim)
        expected[0, 0], expected[2, 1] = rows[3] + rows[7], rows[39]
        assert torch.equal(self.pooled(store, [[3, 7], [], [39]], dtype), expected.to(dtype))

    def test_lookup_and_gradient_of_weights(self, format: Format) -> None:
        store = self.fill(format)
        rows = self.read_all(store)
        ids, weights = [[3, 7], [39, 13]], [2.0, 0.5, 1.0, 3.0]
        out = self.pooled(store, ids, weights=weights)
        torch.testing.assert_close(out[0, 0], 2 * rows[3] + 0.5 * rows[7])
        torch.testing.assert_close(out[1, 1], rows[39] + 3 * rows[13])
        grad = torch.randn(4, self.dim, generator=torch.Generator().manual_seed(1))
        of_weights = torch.empty(4, device=store.device)
        store.weight_gradient(self.bags(store, ids, weights), grad.to(store.device), of_weights)
        torch.testing.assert_close(of_weights.cpu(), (rows[[3, 7, 39, 13]] * grad[[0, 0, 3, 3]]).sum(1))

    # -- moments and updates ---------------------------------------------------------------------------------------

    def test_moments_start_at_zero_and_are_filled_read_and_loaded_by_span(self, format: Format) -> None:
        store = self.fill(format, moments=True)
        assert torch.equal(self.read_all(store, "row"), torch.zeros(SLOTS))
        assert torch.equal(self.read_all(store, "element"), torch.zeros(SLOTS, self.dim))
        store.write(torch.tensor([4], device=store.device), torch.ones(1, device=store.device), "row")
        store.add_moment(Moment("row", "row"))  # this moment exists, and must keep its values
        assert store.moment_names == ["row", "element"]
        assert self.read_all(store, "row").nonzero().tolist() == [[4]]
        store.write(torch.tensor([4], device=store.device), torch.zeros(1, device=store.device), "row")
        for name in store.moment_names:
            store.fill(1, name, 2.0)
            assert store.moment_is_per_row(name) == (name == "row")
            assert store.moment(0, name).shape[0] == 13
            assert not self.read_all(store, name)[:13].any()
            assert (self.read_all(store, name)[13:] == 2).all()
            values = torch.rand_like(store.moment(1, name))
            store.load_moment(1, name, values)
            assert torch.equal(store.moment(1, name), values)
            assert not store.moment(0, name).any()

    @pytest.mark.parametrize("rule", [PLAIN, RowWiseAdagrad.rule, Adam.rule], ids=lambda rule: rule.name)
    def test_update_changes_each_distinct_row_once_and_no_other(self, format: Format, rule: Rule) -> None:
        store = self.fill(format)
        before, bits_before = self.read_all(store), stored_bits(store)
        grad = torch.rand(4, self.dim, generator=torch.Generator().manual_seed(1)) + 0.5
        self.step(store, rule, [[3, 7], [3], [12], [13, 20]], grad)
        total = {3: grad[0] + grad[1], 7: grad[0], 12: grad[2], 13: grad[3], 20: grad[3]}
        after, bits_after = self.read_all(store), stored_bits(store)
        assert [i for i in range(SLOTS) if bits_after[i] != bits_before[i]] == list(total)
        for slot, g in total.items():
            down = {"sgd": g, "rowwise_adagrad": g / g.square().mean().sqrt(), "adam": g.sign()}[rule.name]
            expected = before[slot] - 0.1 * down
            dtype = format.dtype if format.narrow()[slot] else "fp32"
            # The scales of int8 rows never decrease.
            seen = torch.maximum(before[slot].abs(), expected.abs()) if dtype == "int8" else expected
            assert ((after[slot] - expected).abs() <= _spacing(seen, dtype) + 1e-6).all(), slot
        for moment in rule.moments:
            updated = self.read_all(store, moment.name).view(SLOTS, -1).any(1)
            assert updated.nonzero().flatten().tolist() == list(total)

    @pytest.mark.parametrize(
        "off", [{"gate": 0.0}, {"active": (0.0, 0.0)}, {"active": (0.0, 1.0)}], ids=["gate", "all", "one"]
    )
    def test_a_closed_gate_and_inactive_tables_change_nothing(self, format: Format, off: dict[str, Any]) -> None:
        store = self.fill(format)
        before, expected = stored_bits(store), [14, 38] if off.get("active") == (0.0, 1.0) else []
        self.step(store, Adam.rule, [[1, 8], [38, 14]], torch.ones(2, self.dim), **off)
        assert [
            i for i, (old, new) in enumerate(zip(before, stored_bits(store), strict=True)) if old != new
        ] == expected
        assert self.read_all(store, "exp_avg").any(1).nonzero().flatten().tolist() == expected

    def test_bits_depend_on_seeds(self, format: Format) -> None:
        draw = torch.Generator().manual_seed(3)
        ids = (torch.randint(0, 5, (20, 8), generator=draw) + torch.tensor([[3], [19]]).repeat(10, 1)).tolist()
        grad = torch.randn(20, self.dim, generator=draw)

        def run(seeds: tuple[int, int]) -> list[bytes]:
            store = self.fill(format)
            self.step(store, RowWiseAdagrad.rule, ids, grad, seeds=seeds)
            return stored_bits(store)

        once, other = run((3, 4)), run((3, 5))
        assert run((3, 4)) == once
        changed = [i for i in range(SLOTS) if once[i] != other[i]]
        expected = [i for i in range(19, 24) if format.narrow()[i]]
        assert changed == expected if self.dim == DIM else set(changed) <= set(expected)
