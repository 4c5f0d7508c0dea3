"""Test an optimizer's rule: the contract of `hotbed.optim.SparseOptimizer`.

::

    class TestSignDescent(RuleContract):
        backends = ("reference",)  # the formula alone

        def make(self, model):
            return SignDescent(model, lr=0.1)

Kernels must have the bits of the formula. The formula's bits of a row must depend neither on other rows nor on a cut of
its columns, so that sharding plans do not change them.
"""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
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
"""Three blocks of at most 16 columns, so that they can be cut."""
ROWS = {"a": 9, "b": 25}
BACKENDS: tuple[BackendName, ...] = ("reference", "cpu", "triton")
DTYPES: tuple[RowDtype, ...] = ("fp32", "int8")
"""Float32 rows, and rows with scales that are rounded stochastically."""
STEPS = 2


class TwoTables(nn.Module):
    """Two tables with three features, one of them with weights of ids."""

    def __init__(self, backend: BackendName = "reference", dtype: RowDtype = "fp32") -> None:
        super().__init__()
        tables = [Table(name, rows=rows, dim=DIM, dtype=dtype) for name, rows in ROWS.items()]
        features = [Feature("x", table="a"), Feature("y", table="b", pooling="mean"), Feature("z", table="b")]
        self.embeddings = EmbeddingCollection(tables, features, seed=3, backend=backend)

    @override
    def forward(self, ids: Jagged) -> Tensor:
        """Return the concatenated pooled vectors ``[B, 3 · D]``."""
        return self.embeddings(ids).concatenate()

    def rows(self) -> dict[str, Tensor]:
        """Return CPU copies of the rows by table."""
        weights = {name: self.embeddings.weight(name).detach() for name in ROWS}
        return {name: w.to("cpu", torch.float32, copy=True) for name, w in weights.items()}


def _draw_ids(seed: int, size: int = 24, below: int = ROWS["a"]) -> Jagged:
    """Draw ids; row 0 of table a occurs more often than the 32 times that a run sums."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (size,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    popular = torch.randint(0, below, (size, 3), generator=draw)
    popular[:, :2] = 0
    ragged = torch.randint(0, below, (int(lengths.sum()),), generator=draw)
    single = torch.randint(0, below, (size, 1), generator=draw)
    weights = {"z": torch.rand(size, generator=draw)}
    return Jagged.from_dict({"x": popular, "y": (ragged, offsets), "z": single}, weights=weights)


def _train(model: nn.Module, optimizer: SparseOptimizer, batches: Iterable[Jagged | int], device: str = "cpu") -> None:
    """Train one step per batch; an integer is the seed of a drawn batch."""
    for ids in batches:
        optimizer.zero_grad()
        _loss(model, (_draw_ids(ids) if isinstance(ids, int) else ids).to(device)).backward()
        optimizer.step()


def _loss(model: nn.Module, ids: Jagged) -> Tensor:
    vectors: Tensor = model(ids)
    return (vectors - torch.linspace(-1, 1, vectors.shape[1], device=vectors.device)).square().sum(1).mean()


def _state(optimizer: SparseOptimizer) -> list[dict[str, Tensor]]:
    """Return CPU copies of each table's moments and step."""
    saved = optimizer.state_dict()["state"]
    return [{name: t.detach().to("cpu", copy=True) for name, t in saved[i].items()} for i in sorted(saved)]


def _assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert torch.equal(values, expected[name]), f"{name} differs by {(values - expected[name]).abs().max():g}"


class RuleContract(ABC):
    """Tests that every sparse optimizer must pass.

    `backends` can run the rule: ``"reference"`` runs every formula, others need a kernel. Triton is skipped unless
    it is installed, with a GPU or ``TRITON_INTERPRET=1``.
    """

    backends: tuple[BackendName, ...] = BACKENDS

    @abstractmethod
    def make(self, model: nn.Module) -> SparseOptimizer:
        """Make the optimizer of a model's tables, with the options to test."""

    def _trained(self, steps: int = STEPS, dtype: RowDtype = "fp32") -> tuple[TwoTables, SparseOptimizer]:
        model = TwoTables(self.backends[0], dtype)
        optimizer = self.make(model)
        _train(model, optimizer, range(steps))
        return model, optimizer

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("backend", BACKENDS[1:])
    def test_kernels_have_the_bits_of_the_formula(self, backend: BackendName, dtype: RowDtype) -> None:
        if backend not in self.backends:
            pytest.skip(f"this rule has no kernel of backend '{backend}'")
        found: list[tuple[TwoTables, SparseOptimizer]] = []
        both: tuple[tuple[BackendName, str], ...] = ((backend, _device_of(backend)), ("reference", "cpu"))
        for name, device in both:
            model = TwoTables(name, dtype).to(device)
            optimizer = self.make(model)
            before = launches.copy()
            _train(model, optimizer, range(STEPS), device)
            assert (launches - before)[f"{name}.update"] > 0
            found.append((model, optimizer))
        (model, optimizer), (of_formula, its_optimizer) = found
        _assert_equal(model.rows(), of_formula.rows())
        for state, expected in zip(_state(optimizer), _state(its_optimizer), strict=True):
            _assert_equal(state, expected)

    def test_rows_do_not_depend_on_other_rows(self) -> None:
        rows, moments, g, hyper, optimizer = self._arena()
        whole, after = _apply(optimizer, rows, moments, g, hyper, [range(DIM)])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[: len(rows) // 2]
        some = {name: moment[order] for name, moment in moments.items()}
        found, found_after = _apply(optimizer, rows[order], some, g[order], hyper[order], [range(DIM)])
        assert torch.equal(found, whole[order])
        _assert_equal(found_after, {name: moment[order] for name, moment in after.items()})

    def test_columns_may_be_cut_between_blocks(self) -> None:
        # A rule requests sums over columns with `yield`; everything else is column by column.
        rows, moments, g, hyper, optimizer = self._arena()
        whole, after = _apply(optimizer, rows, moments, g, hyper, [range(DIM)])
        cut, cut_after = _apply(optimizer, rows, moments, g, hyper, [range(BLOCK), range(BLOCK, DIM)])
        assert torch.equal(cut, whole)
        _assert_equal(cut_after, after)

    def test_rows_outside_the_batch_keep_their_bits_while_steps_are_counted(self) -> None:
        model, optimizer = self._trained(1)
        before, kept = model.rows(), _state(optimizer)
        _train(model, optimizer, [_draw_ids(seed, below=4) for seed in (1, 2)])
        for name, rows in model.rows().items():
            assert torch.equal(rows[4:], before[name][4:]) and not torch.equal(rows, before[name])
        for new, old in zip(_state(optimizer), kept, strict=True):
            assert new["step"] == old["step"] + 2
            assert all(torch.equal(new[m.name][4:], old[m.name][4:]) for m in optimizer.rule.moments)

    def test_frozen_tables_keep_rows_moments_and_steps(self) -> None:
        model, optimizer = self._trained(1)
        model.embeddings.freeze("a")
        before, kept = model.rows(), _state(optimizer)
        _train(model, optimizer, [1])
        after = _state(optimizer)
        assert torch.equal(model.rows()["a"], before["a"])
        _assert_equal(after[0], kept[0])
        assert after[1]["step"] == 2

    def test_micro_batches_add_up_to_one_step(self) -> None:
        whole, parts = TwoTables(self.backends[0]), TwoTables(self.backends[0])
        one, many = self.make(whole), self.make(parts)
        for seed in range(STEPS):
            ids = _draw_ids(seed)
            _loss(whole, ids).backward()
            one.step()
            for half in torch.arange(ids.batch_size).chunk(2):
                (_loss(parts, ids.take(half)) / 2).backward()
            many.step()
        torch.testing.assert_close(parts.rows(), whole.rows(), rtol=1e-4, atol=1e-5)

    def test_the_state_of_a_table_has_its_moments_and_its_step(self) -> None:
        _, optimizer = self._trained(2)
        for rows, of_table in zip(ROWS.values(), _state(optimizer), strict=True):
            assert set(of_table) == {"step", *(m.name for m in optimizer.rule.moments)}
            assert of_table["step"].dtype == torch.int64 and of_table["step"].shape == () and of_table["step"] == 2
            for moment in optimizer.rule.moments:
                assert of_table[moment.name].shape == ((rows,) if moment.per == "row" else (rows, DIM))

    def test_a_state_dict_resumes_rows_moments_steps_and_options_to_the_bit(self) -> None:
        straight, _ = self._trained(2 * STEPS)
        first, before = self._trained()
        second = TwoTables(self.backends[0])
        second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
        after = self.make(second)
        for group in after.param_groups:
            group["lr"] = 9.0
        after.load_state_dict(before.state_dict())
        _train(second, after, range(STEPS, 2 * STEPS))
        _assert_equal(second.rows(), straight.rows())

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_checkpoint_resumes_to_the_bit(self, dtype: RowDtype, tmp_path: Path) -> None:
        straight, _ = self._trained(2 * STEPS, dtype)
        first, before = self._trained(STEPS, dtype)
        save_checkpoint(tmp_path / "checkpoint", {"model": first, "sparse": before}, step=STEPS).wait()
        second = TwoTables(self.backends[0], dtype)
        after = self.make(second)
        assert load_checkpoint(tmp_path / "checkpoint", {"model": second, "sparse": after}).step == STEPS
        _train(second, after, range(STEPS, 2 * STEPS))
        _assert_equal(second.rows(), straight.rows())

    @pytest.mark.parametrize("overflow_at", [0, 1])
    def test_grad_scaler_skips_a_step_that_overflows(self, overflow_at: int) -> None:
        model = TwoTables(self.backends[0])
        optimizer = self.make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            before, kept = model.rows(), _state(optimizer)
            value = _loss(model, _draw_ids(step))
            scaler.scale(value * float("inf") if step == overflow_at else value).backward()
            scaler.step(optimizer)
            scaler.update()
            updated = step != overflow_at
            for name, rows in model.rows().items():
                assert torch.equal(rows, before[name]) != updated
            for new, old in zip(_state(optimizer), kept, strict=True):
                assert new["step"] == old["step"] + updated
                assert updated or all(torch.equal(new[name], old[name]) for name in new)

    def _arena(self) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor, SparseOptimizer]:
        """Return trained rows and moments of table b, gradients, and hyperparameters of the next step."""
        model, optimizer = self._trained()
        rule, (group, *_) = optimizer.rule, optimizer.param_groups
        line = [1.0, *optimizer._hyper(group)]
        own = dict(zip(rule.hyper, line[len(line) - len(rule.hyper) :], strict=True))
        line += [1 - own[name] ** (STEPS + 1) for name in rule.corrected]
        state = _state(optimizer)[list(ROWS).index("b")]
        g = torch.randn(ROWS["b"], DIM, generator=torch.Generator().manual_seed(5))
        hyper = torch.tensor(line, dtype=torch.float32).repeat(len(g), 1)
        return model.rows()["b"], {m.name: state[m.name] for m in rule.moments}, g, hyper, optimizer


def _apply(
    optimizer: SparseOptimizer,
    rows: Tensor,
    moments: dict[str, Tensor],
    g: Tensor,
    hyper: Tensor,
    cuts: Sequence[range],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a step of rows with cut columns; parts share only sums over columns."""
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
        assert not (blocks and new), "the parts of a row request different numbers of sums"
        if blocks:
            sums = sum_of_blocks(torch.cat(blocks, dim=1))
    for name in per_row:
        assert all(torch.equal(of[name], state[0][name]) for of in state), f"{name} differs between parts of a row"
    merged = {n: state[0][n] if n in per_row else torch.cat([of[n] for of in state], dim=1) for n in moments}
    return torch.cat(new, dim=1), merged


def _device_of(backend: BackendName) -> str:
    """Return the device of a backend, or skip the test if it cannot run."""
    if backend != "triton":
        return "cpu"
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is no GPU, and TRITON_INTERPRET is not 1")
    return "cpu"
