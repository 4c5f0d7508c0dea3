"""List launches that between them compile every kernel: by columns, dtype of rows, kind of bags and rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from hotbed.ops import BagLayout, CacheTags, triton_dense
from hotbed.ops import triton as kernels
from hotbed.ops.layout import FREE
from tests.ops.arenas import OPTIONS, Arena
from tests.ops.cases import occurrences_of, random_rows
from tests.ops.formats import DTYPES
from tests.ops.naive_rules import RULES

Amount = Literal["few", "each", "all"]
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
TABLES, BATCH, ROWS = 26, 64, 40
DIMS = (16, 64, 128)


@dataclass(frozen=True)
class Launch:
    """Calls of operations under conditions; bytes of a row as stored, of its gradient, of what is written."""

    about: str
    row_bytes: int
    grad_bytes: int
    written_bytes: int
    run: Callable[[], None]


def launches(amount: Amount) -> Iterator[Launch]:
    """``few``: float32 rows of 128 columns; ``each``: every dim, dtype and rule; ``all``: their products."""
    if amount == "few":
        yield _lookup(128, "fp32", 0, "one", "fp32")
        yield _update(128, "fp32", 0, "rowwise_adagrad", "fp32")
        yield _interaction(128, "fp32")
        return
    dims = (*DIMS, 17, 32, 40, 200, 256, 1024) if amount == "all" else DIMS
    conditions = [(128, dtype, wide) for dtype in DTYPES for wide in ((0, 4) if dtype in ("bf16", "int8") else (0,))]
    if amount == "all":
        conditions = list(product((128,), DTYPES, (0, 4)))
    conditions = list(dict.fromkeys([*((dim, "fp32", 0) for dim in dims), *conditions]))
    for condition in conditions:
        for kind in ("one", "fixed", "any") if amount == "all" or condition[0] == 128 else ("one",):
            for out in FLOATS if amount == "all" else ("fp32",):
                yield _lookup(*condition, kind, out)
        yield _gather(*condition)
    rules = [("rowwise_adagrad", *condition) for condition in conditions]
    others = [rule for rule in RULES if rule != "rowwise_adagrad"]
    rules += [
        (rule, *condition) for rule, condition in product(others, conditions if amount == "all" else [(128, "fp32", 0)])
    ]
    for rule, *condition in rules:
        for grad in FLOATS if amount == "all" else ("fp32",):
            yield _update(*condition, rule, grad)
    if amount == "each":
        for dtype in ("fp32", "bf16", "int8"):
            yield _update(17, dtype, 0, "rowwise_adagrad", "fp32")  # read a value at a time
    yield _update(128, "fp32", 0, "rowwise_adagrad", "fp32", "mixed")
    yield _update(128, "fp32", 0, "sgd", "bf16", scaled=True)
    yield _weights(128)
    yield _cut(64, is_update=False)
    yield _cut(64, is_update=True)
    for dim, dtype in product(dims, FLOATS):
        yield _interaction(dim, dtype)
    for dtype in FLOATS:
        yield _relu(dtype)
    yield Launch("", 0, 0, 0, _others)


def _rows(dim: int, dtype: str, wide: int):
    return random_rows([ROWS] * TABLES, [wide] * TABLES, dim, DTYPES[dtype])


def _stored(dim: int, dtype: str) -> int:
    """Bytes of a row: an int8 row has a byte for each 128 columns."""
    return dim * DTYPES[dtype].itemsize + (-(-dim // 128) if dtype == "int8" else 0)


def bags_of(kind: str, weighted: bool = False, mean: bool = False) -> BagLayout:
    """Bags of one id, of four, or of any number, of as many features as tables."""
    per_bag = {"one": 1, "fixed": 4, "any": None}[kind]
    ids = BATCH * (per_bag or 1)
    features = [[f * ids, per_bag or -1, f if per_bag is None else 0, f * ROWS, int(mean), f, f] for f in range(TABLES)]
    offsets = torch.arange(BATCH + 1).repeat(TABLES, 1)
    return BagLayout(
        torch.zeros(TABLES * ids, dtype=torch.int32),
        torch.tensor(features),
        offsets if per_bag is None else offsets[:0],
        torch.ones(TABLES * ids) if weighted else None,
        BATCH,
        TABLES * ids,
        mean,
        TABLES + 1,
        1,
        per_bag,
    )


def _lookup(dim: int, dtype: str, wide: int, kind: str, out: str) -> Launch:
    def run() -> None:
        kernels.lookup(_rows(dim, dtype, wide), bags_of(kind), torch.zeros(BATCH, TABLES + 1, dim, dtype=FLOATS[out]))

    about = _about(dim, dtype, wide, kind, f"into {out}")
    return Launch(about, _stored(dim, dtype), 0, dim * FLOATS[out].itemsize, run)


def _gather(dim: int, dtype: str, wide: int) -> Launch:
    def run() -> None:
        kernels.gather(_rows(dim, dtype, wide), torch.zeros(BATCH, dtype=torch.int64), torch.zeros(BATCH, dim))

    return Launch(_about(dim, dtype, wide), _stored(dim, dtype), 0, 4 * dim, run)


def _update(
    dim: int, dtype: str, wide: int, rule: str, grad: str, options: str = "none", *, scaled: bool = False
) -> Launch:
    def run() -> None:
        tables = [ROWS] * TABLES
        every = {name: values[:1] * TABLES for name, values in OPTIONS[options].items()}
        arena = Arena.make(
            RULES[rule], dim, DTYPES[dtype], tables=tables, wide=[wide] * TABLES, active=(1,) * TABLES, options=every
        )
        found = occurrences_of([0] * BATCH * TABLES, BATCH, scaled=scaled)
        groups = kernels.group(found)
        step = arena.step(arena.seeds, torch.tensor(1.0), torch.tensor(True))
        grads = torch.zeros(BATCH, dim, dtype=FLOATS[grad])
        kernels.update(step, arena.rows, arena.moments, found, groups, grads)

    about = _about(dim, dtype, wide, rule, f"gradient {grad}", *(["all options"] if options != "none" else []))
    return Launch(about, _stored(dim, dtype), dim * FLOATS[grad].itemsize, _stored(dim, dtype), run)


def _weights(dim: int) -> Launch:
    """What lookups of weighted bags and sums without a rule need."""

    def run() -> None:
        rows, bags = _rows(dim, "fp32", 0), bags_of("any", weighted=True, mean=True)
        grad = torch.zeros(BATCH, TABLES + 1, dim)
        kernels.lookup(rows, bags, grad)
        kernels.weight_gradient(rows, bags, grad, torch.zeros(len(bags.ids)))
        found = kernels.occurrences(bags)
        groups = kernels.group(found)
        sums = torch.zeros(ROWS, dim)
        kernels.segment_sum(found, groups, grad, None, sums)
        kernels.add_along_tree(torch.arange(ROWS), torch.arange(ROWS), torch.tensor(ROWS), 8, sums)
        kernels.spread(groups, groups.rows)

    return Launch(_about(dim, "fp32", 0, "weighted means"), 4 * dim, 4 * dim, 4 * dim, run)


def _cut(dim: int, *, is_update: bool) -> Launch:
    """What rows need of which this arena has only some columns."""

    def run() -> None:
        tables = [ROWS] * TABLES
        arena = Arena.make(RULES["rowwise_adagrad"], dim, tables=tables, wide=tables, active=(1,) * TABLES)
        found = occurrences_of([0] * BATCH * TABLES, BATCH, scaled=False)
        groups, grad = kernels.group(found), torch.zeros(BATCH, dim)
        step = arena.step(arena.seeds, torch.tensor(1.0), torch.tensor(True))
        if is_update:
            step = replace(step, mean_squares=torch.zeros(BATCH * TABLES))
            kernels.update(step, arena.rows, arena.moments, found, groups, grad)
        else:
            kernels.square_blocks(found, groups, grad, step.inv_scale, torch.zeros(BATCH * TABLES, dim // 16))

    about = _about(dim, "fp32", 0, "cut rows, rowwise_adagrad" if is_update else "squares of cut rows")
    return Launch(about, 4 * dim, 4 * dim, 4 * dim, run)


def _interaction(dim: int, dtype: str) -> Launch:
    def run() -> None:
        vectors, grad = torch.zeros(2, 27, dim, dtype=FLOATS[dtype]), torch.zeros(2, dim + 352, dtype=FLOATS[dtype])
        kernels.interaction(vectors, grad.shape[1])
        kernels.interaction_backward(grad, vectors)

    return Launch(f"27 × {dim} {dtype}", 0, 0, 0, run)


def _relu(dtype: str) -> Launch:
    def run() -> None:
        triton_dense.relu_backward(*(torch.zeros(9000, 512, dtype=FLOATS[dtype]) for _ in range(2)))

    return Launch(f"512 {dtype}", 0, 0, 0, run)


def _others() -> None:
    """Initial values, loss, counts of steps, means over ranks, caches."""
    triton_dense.cross_entropy(torch.zeros(9, 2), torch.zeros(9, 2), torch.ones(9, 1))
    triton_dense.step_seeds(torch.arange(9), torch.arange(9))
    for dtype in FLOATS.values():
        triton_dense.reduce_mean(torch.zeros(9, 300, dtype=dtype), range(9), 9)
    triton_dense.count_steps_(torch.arange(9), torch.ones(9, dtype=torch.int64), torch.tensor(1.0))
    kernels.initial_values_(torch.zeros(9, 128), seed=2**32 - 1, rows=range(9), cols=range(128), bound=0.1)
    for ways, by_count, words in ((32, False, 132), (5, True, 129)):
        wanted, slab = torch.arange(5), torch.zeros(2 * ways, 4 * words, dtype=torch.uint8)
        free = torch.full((2 * ways,), FREE)
        tags = CacheTags(free, torch.zeros_like(free), torch.zeros_like(free), ways, by_count)
        kernels.cache_use(tags, kernels.cache_find(tags, wanted), 3)
        places, _ = kernels.cache_take(tags, wanted, 3)
        kernels.cache_read(slab, places, slab[:5].clone())
        kernels.cache_write(slab, places, slab[:5].clone())


def _about(dim: int, dtype: str, wide: int, *more: str) -> str:
    return ", ".join([f"{dim} {dtype}" + (" behind fp32" if wide else ""), *more])
