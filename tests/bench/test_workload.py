import pytest
import torch

from hotbed.bench.options import OpsOptions
from hotbed.bench.workload import KernelBytes, Workload, interaction_bytes, scatter_ranks
from hotbed.jagged import Jagged
from hotbed.store import DenseStore, Span


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 618, 1000])
def test_scattering_is_a_permutation(rows: int) -> None:
    assert sorted(scatter_ranks(torch.arange(rows), rows).tolist()) == list(range(rows))


@pytest.mark.parametrize("exponent", [0.0, 1.05])
def test_ids_follow_zipfs_law(exponent: float) -> None:
    options = OpsOptions(tables=1, rows=100, dim=4, batch_size=200_000)
    ids = Workload(options).draw(exponent)[0].values
    mass = torch.arange(1, 101).double() ** -exponent
    share = torch.bincount(ids, minlength=100)[scatter_ranks(torch.arange(100), 100)] / len(ids)
    assert torch.allclose(share.double(), mass / mass.sum(), atol=0.004)


def test_batches_are_repeatable_different_and_in_range() -> None:
    options = OpsOptions(tables=3, rows=[5, 700, 1], batch_size=40, pooling=2, ids="int32", weighted=True)
    first, second = Workload(options).draw(1.05, 2)
    again = Workload(options)
    assert torch.equal(first.values, again.draw(1.05)[0].values)
    assert torch.equal(second.values, again.draw(1.05)[0].values)
    assert not torch.equal(first.values, second.values)
    assert first.names == ("t0", "t1", "t2")
    assert first.fixed == (2, 2, 2)
    assert first.values.dtype == torch.int32
    assert first.weights is not None
    for ids, rows in zip(first.values.view(3, -1), (5, 700, 1), strict=True):
        assert int(ids.min()) >= 0
        assert int(ids.max()) < rows


def test_frequent_ids_come_first_where_there_are_fp32_rows() -> None:
    sizes = {"tables": 1, "rows": 1000, "dim": 4, "batch_size": 5000}
    (scattered,) = Workload(OpsOptions(**sizes)).draw(1.05)
    (in_order,) = Workload(OpsOptions(**sizes, dtype="bf16", fp32_rows=10)).draw(1.05)
    assert scattered.values.bincount().argmax() == 0  # rank 0 stays where it is
    assert (in_order.values < 10).float().mean() > 2 * (scattered.values < 10).float().mean() > 0


# -- bytes that kernels must move -------------------------------------------------------------------------------------

# 3 samples × 2 tables × 2 ids; table t0 names rows 0, 1, 5 and t1 rows 2, 3: 12 ids, 5 distinct rows, 6 bags.
IDS = [0, 1, 1, 1, 5, 0, 2, 2, 2, 3, 3, 2]


def counted(store: DenseStore, **options: object) -> KernelBytes:
    o = OpsOptions(tables=2, rows=8, dim=4, batch_size=3, pooling=2, **options)
    weights = torch.ones(len(IDS)) if o.weighted else None
    ids = torch.tensor(IDS, dtype=getattr(torch, o.ids))
    workload = Workload(o)
    jagged = Jagged(["t0", "t1"], ids, batch_size=3, fixed=[2, 2], weights=weights)
    bags = workload.layout(jagged)
    assert store.occurrences(bags).slots.tolist() == workload.slots(jagged).tolist()
    return KernelBytes.of(store.rows, store.moments, bags, store.ops.group(store.occurrences(bags)))


def store(dtype: str = "fp32", fp32_rows: int = 0, moments: tuple[str, ...] = ()) -> DenseStore:
    made = DenseStore([Span(8, fp32_rows)] * 2, 4, dtype=dtype)
    for per in moments:
        made.moments[per] = torch.zeros(16) if per == "row" else torch.zeros(16, 4)
    return made


def test_every_byte_counts_once() -> None:
    moved = counted(store(moments=("row",)), ids="int32")
    assert (moved.ids, moved.distinct, moved.runs, moved.bags) == (12, 5, 5, 6)
    assert moved.lookup == 12 * 4 + 5 * 16 + 6 * 16
    assert moved.occurrences == 12 * 4 + 12 * 8 + 12 * 8
    assert moved.group == 12 * 8 + 12 * 8 + 5 * 8 + 5 * 8 + 5 * 8
    index = 12 * 8 + 12 * 8 + 5 * 8 + 5 * 8 + 5 * 8
    assert moved.update == index + 6 * 16 + 2 * 5 * 16 + 2 * 5 * 4


def test_weights_are_read_and_their_gradient_written() -> None:
    moved = counted(store(), weighted=True)
    assert moved.lookup == 12 * (8 + 4) + 5 * 16 + 6 * 16
    assert moved.occurrences == 12 * (8 + 4) + 12 * (8 + 8 + 4)
    assert moved.weight_gradient == 12 * 8 + 5 * 16 + 6 * 16 + 12 * 4
    assert moved.update == counted(store()).update + 12 * 4


def test_a_row_takes_what_it_is_stored_in() -> None:
    assert counted(store("bf16")).row_bytes == 5 * 8
    assert counted(store("int8")).row_bytes == 5 * (4 + 1)  # one scale per row
    assert counted(store("fp8", fp32_rows=3)).row_bytes == 3 * 16 + 2 * 4  # rows 0, 1 of t0 and 2 of t1 are float32


def test_two_moments_per_element() -> None:
    assert counted(store("bf16", moments=("element", "row"))).moment_bytes == 5 * 4 * 4 + 5 * 4


def test_interaction() -> None:
    forward, backward = interaction_bytes(batch_size=2, vectors=3, dim=4, width=8)
    assert forward == 2 * 3 * 4 * 4 + 2 * 8 * 4
    assert backward == 2 * (2 * 3 * 4 * 4) + 2 * 8 * 4
