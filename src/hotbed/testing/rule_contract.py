"""Check an optimizer's rule: the contract of `hotbed.optim.SparseOptimizer`, as tests that any implementation can run.

A test class of an optimizer subclasses `RuleContract` and says how to make one::

    class TestSignDescent(RuleContract):
        backends = ("reference",)  # the formula alone

        def make(self, model):
            return SignDescent(model, lr=0.1)

Of kernels it asks for the bits of the formula, of the formula for the bits that a sharding plan must not change: those
of a row do not depend on other rows, nor on how its columns are cut.
"""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.ops import BackendName, launches
from hotbed.ops.layout import BLOCK
from hotbed.ops.reference_rules import blocks_of, rule_steps, sum_of_blocks
from hotbed.optim import SparseOptimizer
from hotbed.specs import Feature, RowDtype, Table

DIM = 36
"""Columns: three blocks of 16, of which the last is not full, so that they can be cut."""
ROWS = {"a": 9, "b": 25}
BACKENDS: tuple[BackendName, ...] = ("reference", "cpu", "triton")
DTYPES: tuple[RowDtype, ...] = ("fp32", "int8")
"""Rows as they are computed, and rows with scales that are rounded stochastically."""
STEPS = 2


class Tower(nn.Module):
    """Two tables that three features read, one of them with weights per id."""

    def __init__(self, backend: BackendName = "reference", dtype: RowDtype = "fp32") -> None:
        super().__init__()
        tables = [Table(name, rows=rows, dim=DIM, dtype=dtype) for name, rows in ROWS.items()]
        features = [Feature("x", table="a"), Feature("y", table="b", pooling="mean"), Feature("z", table="b")]
        self.embeddings = EmbeddingCollection(tables, features, seed=3, backend=backend)

    @override
    def forward(self, ids: Jagged) -> Tensor:
        """Pooled vectors side by side ``[B, 3 · D]``."""
        return self.embeddings(ids).concatenate()

    def rows(self, name: str) -> Tensor:
        """A copy of a table's rows on the CPU."""
        return self.embeddings.weight(name).detach().to("cpu", torch.float32, copy=True)


def batch(seed: int, size: int = 24, below: int = ROWS["a"]) -> Jagged:
    """Ids below a limit; row 0 of table a occurs more often than the 32 times that are summed in one run."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (size,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    popular = torch.randint(0, below, (size, 3), generator=draw)
    popular[:, :2] = 0
    ragged = torch.randint(0, below, (int(lengths.sum()),), generator=draw)
    single = torch.randint(0, below, (size, 1), generator=draw)
    weights = {"z": torch.rand(size, generator=draw)}
    return Jagged.from_dict({"x": popular, "y": (ragged, offsets), "z": single}, weights=weights)


def train(model: nn.Module, optimizer: SparseOptimizer, seeds: Sequence[int], device: str = "cpu") -> None:
    """Train a step on each of these batches."""
    for seed in seeds:
        optimizer.zero_grad()
        loss(model, batch(seed).to(device)).backward()
        optimizer.step()


def loss(model: nn.Module, ids: Jagged) -> Tensor:
    """Mean squared distance of the pooled vectors from a fixed vector."""
    vectors: Tensor = model(ids)
    return (vectors - torch.linspace(-1, 1, vectors.shape[1], device=vectors.device)).square().sum(1).mean()


def state_of(optimizer: SparseOptimizer) -> list[dict[str, Tensor]]:
    """Copies of each table's moments and step on the CPU."""
    saved = optimizer.state_dict()["state"]
    return [{name: t.detach().to("cpu", copy=True) for name, t in saved[i].items()} for i in sorted(saved)]


class RuleContract(ABC):
    """What every sparse optimizer must do; the tests of a subclass run for the optimizer that its `make` returns.

    Attributes
    ----------
    backends
        Those that can run the rule: ``"reference"`` runs every formula, the others need a kernel. Triton is left out
        where it is not installed, or there is neither a GPU nor ``TRITON_INTERPRET=1``.
    """

    backends: tuple[BackendName, ...] = BACKENDS

    @abstractmethod
    def make(self, model: nn.Module) -> SparseOptimizer:
        """Make the optimizer of a model's tables, with the options that are to be tested."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("backend", BACKENDS[1:])
    def test_kernels_give_the_bits_of_the_formula(self, backend: BackendName, dtype: RowDtype) -> None:
        """Of rows, moments and steps; rows are float32, or rounded."""
        if backend not in self.backends:
            pytest.skip(f"this rule has no kernel of backend '{backend}'")
        device = _device_of(backend)
        found: list[tuple[list[Tensor], list[dict[str, Tensor]]]] = []
        both: tuple[tuple[BackendName, str], ...] = ((backend, device), ("reference", "cpu"))
        for name, place in both:
            model = Tower(name, dtype).to(place)
            optimizer = self.make(model)
            before = launches.copy()
            train(model, optimizer, range(STEPS), place)
            assert (launches - before)[f"{name}.update"] > 0
            found.append(([model.rows(table) for table in ROWS], state_of(optimizer)))
        (rows, state), (of_formula, state_of_formula) = found
        for name, a, b in zip(ROWS, rows, of_formula, strict=True):
            assert torch.equal(a, b), f"rows of {name} differ by {(a - b).abs().max():g}"
        for a, b in zip(state, state_of_formula, strict=True):
            assert a.keys() == b.keys()
            for name in a:
                assert torch.equal(a[name], b[name]), f"{name} differs by {(a[name] - b[name]).abs().max():g}"

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """A row alone, or in other company, gets the same bits; so any rank may own it."""
        rows, moments, g, hyper, optimizer = self._arena()
        whole, after = _apply(optimizer, rows, moments, g, hyper, [range(DIM)])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[: len(rows) // 2]
        some, some_after = _apply(
            optimizer, rows[order], {n: m[order] for n, m in moments.items()}, g[order], hyper[order], [range(DIM)]
        )
        assert torch.equal(some, whole[order])
        assert all(torch.equal(some_after[name], after[name][order]) for name in after)

    def test_columns_may_be_cut(self) -> None:
        """Between blocks of 16: sums over columns are asked for with ``yield``, all else is column by column."""
        rows, moments, g, hyper, optimizer = self._arena()
        whole, after = _apply(optimizer, rows, moments, g, hyper, [range(DIM)])
        cut, cut_after = _apply(optimizer, rows, moments, g, hyper, [range(BLOCK), range(BLOCK, DIM)])
        assert torch.equal(cut, whole)
        assert all(torch.equal(cut_after[name], after[name]) for name in after)

    def test_rows_that_a_batch_does_not_touch_keep_their_bits(self) -> None:
        """Rows and moments are updated lazily, while steps are counted."""
        model = Tower(self.backends[0])
        optimizer = self.make(model)
        train(model, optimizer, [0])
        before, kept = [model.rows(name) for name in ROWS], state_of(optimizer)
        for seed in (1, 2):
            optimizer.zero_grad()
            loss(model, batch(seed, below=4)).backward()
            optimizer.step()
        after = state_of(optimizer)
        for name, rows in zip(ROWS, before, strict=True):
            assert torch.equal(model.rows(name)[4:], rows[4:])
            assert not torch.equal(model.rows(name), rows)
        for new, old in zip(after, kept, strict=True):
            assert new["step"] == old["step"] + 2
            assert all(torch.equal(new[m.name][4:], old[m.name][4:]) for m in optimizer.rule.moments)

    def test_frozen_tables_keep_rows_moments_and_steps(self) -> None:
        """Also after they were trained."""
        model = Tower(self.backends[0])
        optimizer = self.make(model)
        train(model, optimizer, [0])
        model.embeddings.freeze("a")
        before, kept = model.rows("a"), state_of(optimizer)
        train(model, optimizer, [1])
        after = state_of(optimizer)
        assert torch.equal(model.rows("a"), before)
        assert all(torch.equal(after[0][name], kept[0][name]) for name in kept[0])
        assert after[1]["step"] == 2

    def test_micro_batches_add_up_to_one_step(self) -> None:
        """The rule is applied once to the sum of all gradients, not once per backward."""
        whole, parts = Tower(self.backends[0]), Tower(self.backends[0])
        one, many = self.make(whole), self.make(parts)
        for seed in range(STEPS):
            ids = batch(seed)
            loss(whole, ids).backward()
            one.step()
            for half in torch.arange(ids.batch_size).chunk(2):
                (loss(parts, ids.take(half)) / 2).backward()
            many.step()
        for name in ROWS:
            torch.testing.assert_close(parts.rows(name), whole.rows(name), rtol=1e-4, atol=1e-5)

    def test_the_state_of_a_table_is_its_moments_and_its_step(self) -> None:
        """Of the shapes that the rule declares."""
        model = Tower(self.backends[0])
        optimizer = self.make(model)
        train(model, optimizer, range(2))
        for rows, of_table in zip(ROWS.values(), state_of(optimizer), strict=True):
            assert set(of_table) == {"step", *(m.name for m in optimizer.rule.moments)}
            assert of_table["step"].dtype == torch.int64 and of_table["step"].shape == () and of_table["step"] == 2
            for moment in optimizer.rule.moments:
                assert of_table[moment.name].shape == ((rows,) if moment.per == "row" else (rows, DIM))

    def test_a_state_dict_resumes_to_the_bit(self) -> None:
        """Rows, moments, steps and options."""
        straight, first, second = (Tower(self.backends[0]) for _ in range(3))
        train(straight, self.make(straight), range(2 * STEPS))
        before = self.make(first)
        train(first, before, range(STEPS))
        saved = {k: v.clone() for k, v in first.state_dict().items()}, before.state_dict()
        second.load_state_dict(saved[0])
        after = self.make(second)
        for group in after.param_groups:
            group["lr"] = 9.0
        after.load_state_dict(saved[1])
        train(second, after, range(STEPS, 2 * STEPS))
        assert all(torch.equal(second.rows(name), straight.rows(name)) for name in ROWS)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_checkpoint_resumes_to_the_bit(self, dtype: RowDtype, tmp_path: Path) -> None:
        """As the state dict does, from files."""
        straight, first, second = (Tower(self.backends[0], dtype) for _ in range(3))
        train(straight, self.make(straight), range(2 * STEPS))
        before = self.make(first)
        train(first, before, range(STEPS))
        save_checkpoint(tmp_path / "checkpoint", {"model": first, "sparse": before}, step=STEPS).wait()
        after = self.make(second)
        assert load_checkpoint(tmp_path / "checkpoint", {"model": second, "sparse": after}).step == STEPS
        train(second, after, range(STEPS, 2 * STEPS))
        assert all(torch.equal(second.rows(name), straight.rows(name)) for name in ROWS)

    @pytest.mark.parametrize("overflow_at", [0, 1])
    def test_a_step_that_overflows_touches_nothing(self, overflow_at: int) -> None:
        """Neither a row, nor a moment, nor the count of steps: `torch.amp.GradScaler` skips it."""
        model = Tower(self.backends[0])
        optimizer = self.make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            before, kept = [model.rows(name) for name in ROWS], state_of(optimizer)
            value = loss(model, batch(step))
            scaler.scale(value * float("inf") if step == overflow_at else value).backward()
            scaler.step(optimizer)
            scaler.update()
            touched = step != overflow_at
            for name, rows in zip(ROWS, before, strict=True):
                assert torch.equal(model.rows(name), rows) != touched
            for new, old in zip(state_of(optimizer), kept, strict=True):
                assert new["step"] == old["step"] + touched
                assert touched or all(torch.equal(new[name], old[name]) for name in new)

    def _arena(self) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor, SparseOptimizer]:
        """Rows and moments of table b as training leaves them, gradients, and hyperparameters of the next step."""
        model = Tower(self.backends[0])
        optimizer = self.make(model)
        train(model, optimizer, range(STEPS))
        rule, (group, *_) = optimizer.rule, optimizer.param_groups
        line = [1.0, *optimizer._hyper(group)]
        own = dict(zip(rule.hyper, line[len(line) - len(rule.hyper) :], strict=True))
        line += [1 - own[name] ** (STEPS + 1) for name in rule.corrected]
        state = state_of(optimizer)[list(ROWS).index("b")]
        g = torch.randn(ROWS["b"], DIM, generator=torch.Generator().manual_seed(5))
        hyper = torch.tensor(line, dtype=torch.float32).repeat(len(g), 1)
        return model.rows("b"), {m.name: state[m.name] for m in rule.moments}, g, hyper, optimizer


def _apply(
    optimizer: SparseOptimizer,
    rows: Tensor,
    moments: dict[str, Tensor],
    g: Tensor,
    hyper: Tensor,
    cuts: Sequence[range],
) -> tuple[Tensor, dict[str, Tensor]]:
    """A step of rows whose columns are cut: each part is computed alone, but for sums over columns."""
    rule = optimizer.rule
    per_row = {m.name for m in rule.moments if m.per == "row"}

    def columns(x: Tensor, cut: range) -> Tensor:
        return x[:, cut.start : cut.stop].clone()

    state = [{n: m.clone() if n in per_row else columns(m, cut) for n, m in moments.items()} for cut in cuts]
    steps: list[Generator[Tensor, Tensor, Tensor]] = [
        rule_steps(rule, columns(rows, cut), of, columns(g, cut), hyper, DIM)
        for cut, of in zip(cuts, state, strict=True)
    ]
    new: list[Tensor] = []
    sums: Tensor | None = None
    while not new:
        blocks: list[Tensor] = []
        for part in steps:
            try:
                blocks.append(blocks_of(next(part) if sums is None else part.send(sums)))
            except StopIteration as end:
                new.append(end.value)
        assert not (blocks and new), "the parts of a row ask for different numbers of sums"
        if blocks:
            sums = sum_of_blocks(torch.cat(blocks, dim=1))
    for name in per_row:
        assert all(torch.equal(of[name], state[0][name]) for of in state), f"{name} differs between parts of a row"
    joined = {n: state[0][n] if n in per_row else torch.cat([of[n] for of in state], dim=1) for n in moments}
    return torch.cat(new, dim=1), joined


def _device_of(backend: BackendName) -> str:
    """Where a backend's tensors are; skips the test if it cannot run here."""
    if backend != "triton":
        return "cpu"
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is no GPU, and TRITON_INTERPRET is not 1")
    return "cpu"
