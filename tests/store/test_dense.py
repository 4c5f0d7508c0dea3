import gc

import pytest
import torch

from hotbed.ops import cpu_memory, launches
from hotbed.store import DenseStore
from tests.store.contract import StoreContract


class TestDenseOnHost(StoreContract):
    def make(self, slots, dim):
        return DenseStore(slots, dim)

    def test_it_is_served_by_the_cpu_kernels(self):
        store = self.filled()
        before = launches["cpu.lookup"]
        store.lookup(self.bags(store, [[1]]))
        assert launches["cpu.lookup"] == before + 1
        assert store.tier == "host"


class TestDenseWithReferenceKernels(StoreContract):
    def make(self, slots, dim):
        return DenseStore(slots, dim, backend="reference")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestDenseOnDevice(StoreContract):
    def make(self, slots, dim):
        return DenseStore(slots, dim, device="cuda")

    def test_it_is_served_by_triton_and_moves_with_its_bits(self):
        store = self.filled()
        host = store.to(torch.device("cpu"))
        assert store.tier == "device" and host.tier == "host"
        slots = torch.arange(store.slots)
        assert torch.equal(store.read(slots.cuda()).cpu(), host.read(slots))


def test_large_arenas_are_zeroed_and_aligned_to_huge_pages():
    t = cpu_memory.zeros((1100, 512))
    assert t.shape == (1100, 512) and not t.any()
    if t.nbytes >= cpu_memory.HUGE_PAGE_BYTES:
        assert t.data_ptr() % cpu_memory.HUGE_PAGE_BYTES == 0


def test_memory_comes_back_while_the_pool_is_in_use():
    class Cycle:
        pass

    cycle = Cycle()
    cycle.self, cycle.tensor = cycle, cpu_memory.empty((1100, 512))
    del cycle
    with cpu_memory._lock:
        gc.collect()  # gives the block back; it must not wait for the lock
    assert cpu_memory.empty((1100, 512)).shape == (1100, 512)


def test_free_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(cpu_memory, "MAX_FREE_BYTES", 10 << 20)
    del [cpu_memory.empty((1100, 512)) for _ in range(8)][:]
    gc.collect()
    cpu_memory.empty((1100, 512))
    assert sum(map(len, cpu_memory._free)) <= 10 << 20


def test_results_reuse_memory_only_when_nothing_refers_to_it():
    gc.collect()
    cpu_memory._returned.clear()
    cpu_memory._free.clear()
    first = cpu_memory.empty((1100, 512))
    address = first.data_ptr()
    view = first[5:]
    del first
    second = cpu_memory.empty((1100, 512))
    assert second.data_ptr() != address
    del view
    third = cpu_memory.empty((1100, 512))
    assert third.data_ptr() == address
    assert second.data_ptr() != third.data_ptr()
