import pytest
import torch

from hotbed.bench.options import OpsOptions
from hotbed.bench.workload import Workload, scatter_ranks, zipf_ranks


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 618, 1000])
def test_scattering_is_a_permutation(rows: int) -> None:
    assert sorted(scatter_ranks(torch.arange(rows), rows).tolist()) == list(range(rows))


def test_ranks_follow_zipfs_law() -> None:
    ranks = zipf_ranks(100, 1.05, 200_000, torch.Generator().manual_seed(0))
    mass = torch.arange(1, 101).double() ** -1.05
    share = torch.bincount(ranks, minlength=100) / len(ranks)
    assert torch.allclose(share.double(), mass / mass.sum(), atol=0.004)


def test_exponent_0_is_uniform() -> None:
    ranks = zipf_ranks(10, 0.0, 100_000, torch.Generator().manual_seed(0))
    assert torch.allclose(torch.bincount(ranks, minlength=10) / len(ranks), torch.tensor(0.1), atol=0.01)


def test_batches_are_repeatable_different_and_in_range() -> None:
    options = OpsOptions(tables=3, rows=[5, 700, 1], batch_size=40, pooling=2, ids="int32", weighted=True)
    first, second = Workload(options).draw(1.05, 2)
    again = Workload(options).draw(1.05, 2)[0]
    assert torch.equal(first.values, again.values)
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
