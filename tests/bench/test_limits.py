import pytest
import torch
from torch import Tensor

from hotbed import large_tensors
from hotbed.bench import limits
from hotbed.bench.limits import (
    NO_MOMENT,
    MatrixRows,
    copy_limit,
    copy_way,
    gather_limit,
    rows_by_matrix,
    scatter_limit,
    torch_gather,
    torch_scatters,
)
from hotbed.ops.cpu_runtime import launch
from hotbed.store import DenseStore, Span

CPU = torch.device("cpu")


def numbers(*shape: int) -> Tensor:
    return torch.randint(-1000, 1000, shape, dtype=torch.int32)


@pytest.mark.parametrize(("pooling", "pieces"), [(1, 1), (3, 1), (1, 4), (5, 2)])
def test_gather_is_a_sum_of_selected_rows(pooling: int, pieces: int) -> None:
    bags = 2100  # more than two tasks
    matrix, at = numbers(50, 6), torch.randint(0, 50, (bags * pooling,))
    out = numbers(bags, pieces, 6)
    launch(limits._gather, matrix.numpy(), at.numpy(), pooling, out.numpy(), False)
    sums = torch.index_select(matrix, 0, at).view(bags, pooling, 6).sum(1, dtype=torch.int32)
    assert torch.equal(out, sums[:, None].expand(-1, pieces, -1))


def test_wide_rows_are_folded_into_narrow_vectors() -> None:
    matrix, at, out = numbers(50, 6), torch.randint(0, 50, (4200,)), numbers(2100, 1, 3)
    launch(limits._gather, matrix.numpy(), at.numpy(), 2, out.numpy(), False)
    assert torch.equal(out[:, 0], matrix[at].view(2100, 4, 3).sum(1, dtype=torch.int32))
    grad, distinct = numbers(2100, 1, 3), torch.arange(50)
    expected = matrix + grad[:50].view(50, 1, 3).expand(-1, 2, -1).reshape(50, 6)
    launch(limits._scatter, matrix.numpy(), distinct.numpy(), NO_MOMENT, NO_MOMENT, distinct.numpy(), grad.numpy())
    assert torch.equal(matrix, expected)


@pytest.mark.parametrize("pieces", [1, 2])
def test_rows_are_gathered_past_the_caches(pieces: int) -> None:
    matrix, at = numbers(50, 32), torch.randint(0, 50, (2100,))
    out = large_tensors.empty((1 << 15, pieces, 32), torch.int32)[:2100]
    launch(limits._gather, matrix.numpy(), at.numpy(), 1, out.numpy(), True)
    assert torch.equal(out, torch.index_select(matrix, 0, at)[:, None].expand(-1, pieces, -1))


@pytest.mark.parametrize(("bags", "pooling", "ways"), [(100, 1, 2), (1 << 17, 1, 3), (1 << 17, 2, 1)])
def test_a_large_gather_may_go_past_the_caches(bags: int, pooling: int, ways: int) -> None:
    store = DenseStore([Span(1000, 0)], 16, dtype="fp32")
    parts = rows_by_matrix(store.rows, torch.randint(0, 1000, (bags * pooling,)), pooling)
    limit = gather_limit(parts, pooling, 0)
    assert len(limit.ways) == ways
    for way in limit.ways:
        way.move()


@pytest.mark.parametrize("pieces", [1, 2])
def test_scatter_is_index_add_on_distinct_rows(pieces: int) -> None:
    matrix, at, grad = numbers(5000, 6), torch.randperm(5000)[:2100].sort().values, numbers(2100, pieces, 6)
    m0, slots = numbers(5000, 1), at.flip(0).contiguous()
    summed = grad.sum(1, dtype=torch.int32)
    expected = matrix.index_add(0, at, summed)
    moments = m0.index_add(0, slots, grad[:, 0, :1])
    launch(limits._scatter, matrix.numpy(), at.numpy(), m0.numpy(), NO_MOMENT, slots.numpy(), grad.numpy())
    assert torch.equal(matrix, expected)
    assert torch.equal(m0, moments)


@pytest.mark.parametrize("grads", [700, 4000])
def test_scatter_takes_fewer_or_more_gradients_than_rows(grads: int) -> None:
    matrix, at, grad = numbers(5000, 6), torch.randperm(5000)[:2100], numbers(grads, 1, 6)
    expected = matrix.index_add(0, at, grad[torch.arange(2100) % grads, 0])
    unused = launch(limits._scatter, matrix.numpy(), at.numpy(), NO_MOMENT, NO_MOMENT, at.numpy(), grad.numpy())
    assert torch.equal(matrix, expected)
    assert torch.equal(torch.from_numpy(unused).sum(0), grad[2100:, 0].sum(0))  # those left over were read


@pytest.mark.parametrize(
    ("dtype", "fp32_rows", "words", "vectors", "bf16_vectors"),
    [
        ("fp32", 0, [8], [(4, 1, 8)], [(4, 1, 4)]),
        ("bf16", 0, [4], [(4, 2, 4)], [(4, 1, 4)]),
        ("int8", 2, [8, 2], [(3, 1, 8), (1, 4, 2)], [(3, 1, 4), (1, 2, 2)]),
        ("fp8", 5, [8, 2], [(3, 1, 8), (1, 4, 2)], [(3, 1, 4), (1, 2, 2)]),
    ],
)
def test_parts_are_the_rows_that_ids_name(
    dtype: str, fp32_rows: int, words: list[int], vectors: list[tuple[int, ...]], bf16_vectors: list[tuple[int, ...]]
) -> None:
    store = DenseStore([Span(10, fp32_rows), Span(10, fp32_rows)], 8, dtype=dtype)
    slots = torch.arange(20)
    store.write(slots, slots[:, None].expand(-1, 8).float())
    named = torch.tensor([11, 19, 0, 0])
    parts = rows_by_matrix(store.rows, named, 1)
    assert [p.matrix.shape[1] for p in parts] == words
    assert [tuple(p.vectors().shape) for p in parts] == vectors
    assert [tuple(p.vectors().shape) for p in rows_by_matrix(store.rows, named, 1, torch.bfloat16)] == bf16_vectors
    found = [
        p.matrix[p.at].view(store.rows.wide.dtype if width == 8 else store.rows.narrow.dtype)
        for p, width in zip(parts, words, strict=True)
    ]
    if dtype != "int8":
        assert [row[0].item() for t in found for row in t.float()] == store.read(torch.cat([p.slots for p in parts]))[
            :, 0
        ].tolist()
    assert sorted(torch.cat([p.slots for p in parts]).tolist()) == [0, 0, 11, 19]


@pytest.mark.parametrize("vectors", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dtype", "fp32_rows"), [("fp32", 0), ("int8", 3)])
def test_limits_leave_every_bit_as_it_is(dtype: str, fp32_rows: int, vectors: torch.dtype) -> None:
    store = DenseStore([Span(40, fp32_rows)], 8, dtype=dtype)
    store.initialize(0, seed=1, rows=range(40), cols=range(8), bound=0.5)
    store.moments["v"] = torch.rand(40)
    store.moments["m"] = torch.rand(40, 8)
    tensors = [*vars(store.rows).values(), *store.moments.values()]
    before = [t.clone() for t in tensors]
    slots = torch.randint(0, 40, (60,))
    parts = rows_by_matrix(store.rows, slots, 2, vectors)
    distinct = [p._replace(at=p.at.unique(), slots=p.slots.unique()) for p in parts]
    beside = [m.view(40, -1).view(torch.int32) for m in store.moments.values()]
    ways = [
        *gather_limit(parts, 2, 100).ways,
        *scatter_limit(parts, store.moments, 100).ways,
        torch_gather(parts, 100),
        *torch_scatters(distinct, beside, 100),
    ]
    for way in ways:
        way.move()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_torch_ways_are_scaled_by_bytes() -> None:
    part = MatrixRows(numbers(10, 4), torch.tensor([1, 1, 3]), torch.tensor([1, 1, 3]), 3, 16)
    assert torch_gather([part], 1000).scale == 1000 / (2 * 16 + 3 * 16 + 3 * 8)
    distinct = part._replace(at=torch.tensor([1, 3]), slots=torch.tensor([1, 3]))
    add, copy = torch_scatters([distinct], [numbers(10, 1)], 1000)
    rows, index = 2 * (16 + 4), 2 * 2 * 8
    assert add.scale == 1000 / (3 * rows + index)
    assert copy.scale == 1000 / (2 * rows + index)


def test_index_select_competes_where_it_does_the_same() -> None:
    part = MatrixRows(numbers(10, 4), torch.tensor([1, 1, 3]), torch.tensor([1, 1, 3]), 3, 16)
    assert len(gather_limit([part], 1, 1).ways) == 2
    assert len(gather_limit([part], 3, 1).ways) == 1
    assert len(gather_limit([part._replace(vector_bytes=32)], 1, 1).ways) == 1
    assert len(gather_limit([part, part], 1, 1).ways) == 1


def test_copy_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COPY_BYTES", 4096)
    copy = copy_way(CPU)
    copy.move()
    assert copy_limit(copy, 2 * 4096).ways[0].scale == 1
