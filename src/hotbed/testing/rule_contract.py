"""Test an optimizer's rule: the contract of `hotbed.optim.SparseOptimizer`.

::

    class TestSignDescent(RuleContract):
        backends = ("reference",)  # the rule has a formula, but no kernels

        def make(self, model):
            return SignDescent(model, lr=0.1)

Kernels must compute the same bits as the formula. The bits of a row must depend neither on other rows nor on how its
columns are cut, so that a sharding plan does not change them.
"""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
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
from hotbed.ops.reference import blocks_of, rule_steps, sum_of_blocks
from hotbed.optim import Rule, SparseOptimizer
from hotbed.specs import Feature, RowDtype, Table

DIM = 36
"""Columns of the tables: three blocks of at most 16 columns, between which tables can be cut."""
ROWS = {"a": 9, "b": 25}
BACKENDS: tuple[BackendName, ...] = ("reference", "cpu", "triton")
DTYPES: tuple[RowDtype, ...] = ("fp32", "int8")
"""Dtypes of rows: float32, and int8, which has scales and is rounded stochastically."""
STEPS = 2


class TwoTables(nn.Module):
    """A model of two tables with three features. The ids of one feature have weights."""

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
        return {n: self.embeddings.weight(n).detach().to("cpu", torch.float32, copy=True) for n in ROWS}


def _draw_ids(seed: int, below: int = ROWS["a"]) -> Jagged:
    """Draw ids less than ``below`` for 24 samples.

    Row 0 of table a occurs more than 32 times, so that kernels sum its gradients in several runs.
    """
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (24,), generator=draw)
    popular = torch.randint(0, below, (24, 3), generator=draw)
    popular[:, :2] = 0
    ragged = torch.randint(0, below, (int(lengths.sum()),), generator=draw)
    single = torch.randint(0, below, (24, 1), generator=draw)
    ids = {"x": popular, "y": (ragged, nn.functional.pad(lengths.cumsum(0), (1, 0))), "z": single}
    return Jagged.from_dict(ids, weights={"z": torch.rand(24, generator=draw)})


def _train(model: nn.Module, optimizer: SparseOptimizer, batches: Iterable[Jagged | int], device: str = "cpu") -> None:
    """Train one step per batch. An integer in ``batches`` is the seed of a batch (`_draw_ids`)."""
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

    `backends` are the backends that can run the rule: ``"reference"`` runs every formula, and all others need a kernel.
    Tests of Triton are skipped unless Triton is installed, and there is a GPU or ``TRITON_INTERPRET=1``.
    """

    backends: tuple[BackendName, ...] = BACKENDS

    @abstractmethod
    def make(self, model: nn.Module) -> SparseOptimizer:
        """Return the optimizer to test, with the options to test, for the tables of a model."""

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

        def train(name: BackendName, device: str) -> list[dict[str, Tensor]]:
            model = TwoTables(name, dtype).to(device)
            optimizer = self.make(model)
            before = launches.copy()
            _train(model, optimizer, range(STEPS), device)
            assert (launches - before)[f"{name}.update"] > 0
            return [model.rows(), *_state(optimizer)]

        for found, expected in zip(train(backend, _device_of(backend)), train("reference", "cpu"), strict=True):
            _assert_equal(found, expected)

    def test_rows_depend_neither_on_other_rows_nor_on_a_cut_of_columns(self) -> None:
        # Except for the sums over columns that a rule requests with `yield`, each column is computed by itself.
        model, optimizer = self._trained()
        rule, state, rows = optimizer.rule, _state(optimizer)[list(ROWS).index("b")], model.rows()["b"]
        line = [1.0, *optimizer._hyper(optimizer.param_groups[0])]
        own = dict(zip(rule.hyper, line[len(line) - len(rule.hyper) :], strict=True))
        line += [1 - own[name] ** (STEPS + 1) for name in rule.corrected]
        g = torch.randn(rows.shape, generator=torch.Generator().manual_seed(5))
        order = torch.randperm(len(g), generator=torch.Generator().manual_seed(1))
        some, whole, cut = order[: len(g) // 2], [range(DIM)], [range(BLOCK), range(BLOCK, DIM)]
        expected = _apply(rule, {"rows": rows} | {m.name: state[m.name] for m in rule.moments}, g, line, whole)
        for at, cuts in ((some, whole), (torch.arange(len(g)), cut)):
            before = {"rows": rows[at]} | {m.name: state[m.name][at] for m in rule.moments}
            _assert_equal(_apply(rule, before, g[at], line, cuts), {name: t[at] for name, t in expected.items()})

    def test_rows_outside_the_batch_keep_their_bits_while_steps_are_counted(self) -> None:
        model, optimizer = self._trained(1)
        before, kept = model.rows(), _state(optimizer)
        _train(model, optimizer, [_draw_ids(seed, below=4) for seed in (1, 2)])
        for name, rows in model.rows().items():
            assert torch.equal(rows[4:], before[name][4:]) and not torch.equal(rows, before[name])
        for rows, new, old in zip(ROWS.values(), _state(optimizer), kept, strict=True):
            shapes = {m.name: (rows,) if m.per == "row" else (rows, DIM) for m in optimizer.rule.moments}
            assert {name: tuple(t.shape) for name, t in new.items()} == {"step": ()} | shapes
            assert new["step"].dtype == torch.int64 and new["step"] == old["step"] + 2 == 3
            assert all(torch.equal(new[name][4:], old[name][4:]) for name in shapes)

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

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("saved_as", ["state dict", "checkpoint"])
    def test_a_saved_state_resumes_to_the_bit(self, saved_as: str, dtype: RowDtype, tmp_path: Path) -> None:
        straight, _ = self._trained(2 * STEPS, dtype)
        first, before = self._trained(STEPS, dtype)
        second = TwoTables(self.backends[0], dtype)
        after = self.make(second)
        if saved_as == "checkpoint":
            save_checkpoint(tmp_path / "saved", {"model": first, "sparse": before}, step=STEPS).wait()
            assert load_checkpoint(tmp_path / "saved", {"model": second, "sparse": after}).step == STEPS
        else:
            second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
            for group in after.param_groups:
                group["lr"] = 9.0
            after.load_state_dict(before.state_dict())
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


def _apply(
    rule: Rule, values: dict[str, Tensor], g: Tensor, line: list[float], cuts: Sequence[range]
) -> dict[str, Tensor]:
    """Apply a step separately to the columns of each range in ``cuts``. Return the rows and moments with all columns.

    The parts exchange only sums over columns, like ranks that each hold some columns of every row.
    """
    per_row = {m.name for m in rule.moments if m.per == "row"}
    hyper = torch.tensor(line, dtype=torch.float32).repeat(len(g), 1)
    parts = [{n: (t if n in per_row else t[:, c.start : c.stop]).clone() for n, t in values.items()} for c in cuts]
    steps = [
        rule_steps(rule, part.pop("rows"), part, g[:, cut.start : cut.stop].clone(), hyper, DIM)
        for cut, part in zip(cuts, parts, strict=True)
    ]
    new: list[Tensor] = []
    sums: Tensor | None = None
    while not new:
        blocks: list[Tensor] = []
        for step in steps:
            try:
                blocks.append(blocks_of(next(step) if sums is None else step.send(sums)))
            except StopIteration as end:
                new.append(end.value)
        assert not (blocks and new), "the parts of a row request different numbers of sums"
        if blocks:
            sums = sum_of_blocks(torch.cat(blocks, dim=1))
    for name in per_row:
        assert all(torch.equal(part[name], parts[0][name]) for part in parts), f"{name} differs between parts of a row"
    moments = {n: t if n in per_row else torch.cat([part[n] for part in parts], dim=1) for n, t in parts[0].items()}
    return {"rows": torch.cat(new, dim=1)} | moments


def _device_of(backend: BackendName) -> str:
    """Return the device of a backend. Skip the test if the backend cannot run."""
    if backend != "triton":
        return "cpu"
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is no GPU, and TRITON_INTERPRET is not 1")
    return "cpu"
