"""Kernels have no races, whatever the order of their programs; and the checker that says so finds those that have."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("with a GPU kernels are not interpreted", allow_module_level=True)

from triton.runtime.errors import InterpreterError

from hotbed.embed.dense_parallel import average_ranks
from hotbed.ops import (
    CacheTags,
    reference,
    triton,
    triton_cache,
    triton_dense,
    triton_group,
    triton_lookup,
    triton_tree,
    triton_update,
)
from hotbed.ops.layout import FREE
from tests.ops.arenas import OPTIONS, SEGMENTS, Arena, gradient, oracle
from tests.ops.cases import CASES, Kernels, occurrences_of, random_rows
from tests.ops.naive_rules import RULES

from .race import checking

Same = Callable[[], bool]


def _lookup(ops: Any, dim: int = 17) -> Same:
    """Whether vectors of ragged bags, and of more samples than a program takes, are those of the reference."""
    ragged, long = CASES["mixed"], CASES["one_hot"]

    def same() -> bool:
        found = []
        for case, columns in ((ragged, dim), (long, 600)):
            for kernels in (ops, reference):
                out = torch.zeros(case.batch, case.width, columns)
                kernels.lookup(case.rows(columns), case.layout(), out)
                found.append(out)
        return torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])

    return same


def _gather(ops: Any) -> Same:
    """Whether rows of all tables, of more slots than a program takes, are those of the reference."""
    rows = random_rows([4, 300], [1, 200], 600, torch.int8)
    slots = torch.randint(0, 304, (50,), generator=torch.Generator().manual_seed(1))

    def same() -> bool:
        found = [torch.zeros(len(slots), 600) for _ in range(2)]
        for kernels, out in zip((ops, reference), found, strict=True):
            kernels.gather(rows, slots, out)
        return torch.equal(*found)

    return same


def _update(ops: Any, segments: str = "two_runs_each", dim: int = 200) -> Same:
    """Whether rows after a step are those of the reference."""
    before = Arena.make(RULES["rowwise_adagrad"], dim, options=OPTIONS["mixed"])
    found = occurrences_of(SEGMENTS[segments], 12, scaled=True)

    def same() -> bool:
        after = [
            before.updated(kernels, found, gradient(12, dim)).bits()
            for kernels in (Kernels("triton", torch.device("cpu"), ops), oracle)
        ]
        return all((x == y).all() for x, y in zip(*after, strict=True))

    return same


def _group(ops: Any) -> Same:
    """Whether groups of more positions than a program takes are those of the reference."""
    found = occurrences_of([3] * 1100 + [1] * 40 + [3, 0], 12, scaled=False)

    def same() -> bool:
        one, other = ops.group(found), reference.group(found)
        count, runs = other.counts.tolist()
        return one.counts.tolist() == [count, runs] and all(
            torch.equal(getattr(one, name)[:n], getattr(other, name)[:n])
            for name, n in (("rows", count), ("run_starts", runs + 1), ("group_runs", count + 1))
        )

    return same


def _cache(ops: Any) -> Same:
    """Whether new keys get the places that the reference gives them."""

    def same() -> bool:
        results = []
        for kernels in (ops, reference):
            free = torch.full((16,), FREE)
            tags = CacheTags(free, torch.zeros_like(free), torch.zeros_like(free), 4, False)
            places, _ = kernels.cache_take(tags, torch.arange(11), 3)
            kernels.cache_use(tags, places, 4)
            results.append((places, tags.keys, tags.counts))
        return all(torch.equal(x, y) for x, y in zip(*results, strict=True))

    return same


def _interaction(ops: Any) -> Same:
    vectors, grad = torch.randn(3, 5, 17), torch.randn(3, 32)

    def same() -> bool:
        out, back = (
            [kernels.interaction(vectors, 32), kernels.interaction_backward(grad, vectors)]
            for kernels in (ops, reference)
        )
        return all(torch.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in zip(out, back, strict=True))

    return same


def _loss(ops: Any) -> Same:
    """Whether the loss of more logits than a program takes, and its gradient, are torch's."""
    logits, labels, weights = torch.randn(700, 3), torch.rand(700, 3).round(), torch.rand(700, 1)

    def same() -> bool:
        total, gradient = getattr(ops, "cross_entropy", triton_dense.cross_entropy)(logits, labels, weights)
        x = logits.clone().requires_grad_()
        of_torch = torch.nn.functional.binary_cross_entropy_with_logits(x, labels, weights, reduction="sum")
        of_torch.backward()
        return torch.allclose(total, of_torch, rtol=1e-4) and torch.allclose(gradient, x.grad, rtol=1e-4, atol=1e-6)

    return same


def _relu(ops: Any) -> Same:
    """Whether the gradient of more rows than a program takes passes as by torch, and its sum."""
    of_out, out = torch.randn(600, 150), torch.randn(600, 150).relu()

    def same() -> bool:
        found, total = getattr(ops, "relu_backward", triton_dense.relu_backward)(of_out, out)
        expected = torch.ops.aten.threshold_backward(of_out, out, 0)
        return torch.equal(found, expected) and torch.allclose(total, expected.sum(0), rtol=1e-4, atol=1e-4)

    return same


def _mean(ops: Any) -> Same:
    """Whether a mean over more columns than a program takes is that of rows added along the tree."""
    values, leaves = torch.randn(7, 300), range(7)
    expected = average_ranks(values.clone(), leaves, 7)
    return lambda: torch.equal(getattr(ops, "reduce_mean", triton_dense.reduce_mean)(values, leaves, 7), expected)


def _tree(ops: Any) -> Same:
    """Whether sums of the slots of more entries than a program takes are those of the reference."""
    keys = torch.tensor([8 * slot + rank for slot in range(90) for rank in range(8) if (5 * slot + 3 * rank) % 7 < 4])
    places = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))
    values, first = torch.randn(len(keys), 17), torch.cat([torch.ones(1), (keys // 8).diff()]) != 0

    def same() -> bool:
        found = [values.clone() for _ in range(2)]
        for kernels, out in zip((ops, reference), found, strict=True):
            kernels.add_along_tree(keys, places, torch.tensor(len(keys)), 8, out)
        return torch.equal(*(out[places[first]] for out in found))

    return same


OPERATIONS: dict[str, Callable[[Any], Same]] = {
    "lookup": _lookup,
    "gather": _gather,
    "update": _update,
    "group": _group,
    "cache": _cache,
    "interaction": _interaction,
    "loss": _loss,
    "relu": _relu,
    "mean": _mean,
    "tree": _tree,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_have_no_races(name: str) -> None:
    for seed in (0, 1):
        with checking(seed) as found:
            assert OPERATIONS[name](triton)()
        assert not found.faults
        assert found.launches and found.programs > 1 and found.addresses


@dataclass(frozen=True)
class Mutation:
    """A kernel's file, what of it is replaced by what, and an operation that is wrong then."""

    module: ModuleType
    find: str
    put: str
    operation: str
    fault: str


LAST_RUN = "-1, 2 * (start // RUN) + (ahead != number).to(tl.int64)"
MUTATIONS = {
    "two runs leave their partial sums in one place": Mutation(
        triton_group, LAST_RUN, "-1, 2 * (start // RUN)", "update", "by several programs|different values"
    ),
    "a sum that goes nowhere is stored in front of the buffer": Mutation(
        triton_update, "mask=(to >= 0)", "mask=(to >= -1)", "update", "out of bounds"
    ),
    "the first partial sum is not stored": Mutation(triton_update, "mask=(to >= 0)", "mask=(to > 0)", "update", ""),
    "partial sums of columns beyond the last are not 0": Mutation(
        triton_update,
        "(k + i + col * 0 < runs) & (col < D), other=0.0)",
        "(k + i + col * 0 < runs) & (col < D))",
        "update",
        "",
    ),
    "samples beyond the last are pooled": Mutation(
        triton_lookup, "mask=(sample < batch_size)[:, None] & ", "mask=", "lookup", "out of bounds"
    ),
    "all programs pool the same samples": Mutation(
        triton_lookup,
        "tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)\n    live",
        "tl.program_id(0) % 1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)\n    live",
        "lookup",
        "by several programs",
    ),
    "every program closes the list of runs": Mutation(
        triton_group, "last = i == total - 1", "last = live", "group", "by several programs"
    ),
    "every program places the keys of its set": Mutation(
        triton_cache,
        "if tl.load(of_set + at - 1, mask=at > 0, other=-1) != mine:",
        "if mine == mine:",
        "cache",
        "by several programs",
    ),
    "all lanes write to one address": Mutation(
        triton_cache,
        'tl.atomic_add(counts + place, place * 0 + 1, mask=place >= 0, sem="relaxed")',
        "tl.store(counts + place * 0, place, mask=place >= 0)",
        "cache",
        "different values",
    ),
    "all samples of an interaction go to the first one": Mutation(
        triton_dense,
        "to = out + sample * WIDTH\n    dtype",
        "to = out + sample * 0\n    dtype",
        "interaction",
        "by several programs",
    ),
    "columns beyond the last of an interaction are read": Mutation(
        triton_dense,
        "mask=(i < N) & (col < D), other=0.0)\n        gram",
        "mask=i < N, other=0.0)\n        gram",
        "interaction",
        "",
    ),
    "all programs of a loss leave their sums in one place": Mutation(
        triton_dense, "tl.store(sums + tl.program_id(0), tl.sum", "tl.store(sums, tl.sum", "loss", "by several programs"
    ),
    "all parts of a gradient leave their sums in one place": Mutation(
        triton_dense, "sums + tl.program_id(0).to(tl.int64) * COLUMNS", "sums", "relu", "by several programs"
    ),
    "logits beyond the last have a gradient": Mutation(
        triton_dense, "tl.store(gradient + i, grad, mask=live)", "tl.store(gradient + i, grad)", "loss", "out of bounds"
    ),
    "a program counts the groups of its neighbour too": Mutation(
        triton_group,
        "tl.store(counts + tl.program_id(0), tl.sum(first",
        "tl.store(counts + tl.program_id(0) // 2, tl.sum(first",
        "group",
        "by several programs",
    ),
    "places of groups are counted from 0 instead of 1": Mutation(
        triton_group, "tl.store(rows + g - 1, tl.load", "tl.store(rows + g, tl.load", "group", ""
    ),
    "every position of a group places its row, those beyond the last too": Mutation(
        triton_group,
        "tl.load(ordered + i, mask=live, other=0), mask=starts_here)",
        "tl.load(ordered + i, mask=live, other=0))",
        "group",
        "by several programs",
    ),
    "every entry of a slot starts its sum": Mutation(
        triton_tree,
        "live = (at < total) & ((key >> LEVELS) != (before >> LEVELS)) & ",
        "live = (at < total) & ",
        "tree",
        "written by one program and read by another",
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # garbage must be found by what it does
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_checker_finds_races(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    ops = _mutated(mutation, tmp_path)
    with checking() as found:
        try:
            same = OPERATIONS[mutation.operation](ops)()
        except InterpreterError:  # out of bounds, or a calculation with garbage
            same = False
    assert not same or found.faults
    if mutation.fault:
        assert any(re.search(mutation.fault, fault) for fault in found.faults), found.faults


def test_the_documentation_lists_all_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs/archive/gpu_kernels.md").read_text(encoding="utf-8")
    section = page[page.index("## Mutations that the") : page.index("## Launches and waits")]
    assert re.findall(r"^\| (.+?) \| `_", section, re.MULTILINE) == list(MUTATIONS)


class _Ops:
    """The operations of Triton, but for those of some modules."""

    def __init__(self, *modules: ModuleType) -> None:
        self._modules = modules

    def __getattr__(self, name: str) -> Any:
        return next(getattr(module, name) for module in (*self._modules, triton) if hasattr(module, name))


def _mutated(mutation: Mutation, folder: Path) -> Any:
    """Operations with a mutation; its file is loaded beside the real one, as is that of the update, which calls it."""
    source = Path(mutation.module.__file__ or "").read_text(encoding="utf-8")
    assert source.count(mutation.find) == 1, "the mutation fits no more"
    changed = _load(folder, mutation.module.__name__, source.replace(mutation.find, mutation.put))
    if mutation.module is not triton_group:
        return _Ops(changed)
    update = Path(triton_update.__file__ or "").read_text(encoding="utf-8")
    caller = _load(folder, triton_update.__name__, update)
    caller.list_runs = changed.list_runs  # pyright: ignore[reportAttributeAccessIssue]
    return _Ops(changed, caller)


def _load(folder: Path, name: str, source: str) -> ModuleType:
    """A module from source, of which Triton reads the file."""
    file = folder / f"{name.rsplit('.', maxsplit=1)[-1]}.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mutated_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
