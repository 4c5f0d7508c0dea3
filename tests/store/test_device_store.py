"""A dense store keeps the contract on every backend and in every memory; large arenas reuse huge pages."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed import large_tensors
from hotbed.ops import launches
from hotbed.optim import Adam, Moment
from hotbed.optim.sgd import PLAIN
from hotbed.store import DenseStore, Span, Storage
from hotbed.testing.store_contract import BYTES, DIM, SLOTS, Format, StoreContract, stored_bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TestDenseOnHost(StoreContract):
    every_format = True

    def make(self, spans, dim, dtype):
        return DenseStore(spans, dim, dtype=dtype)

    def test_it_is_served_by_the_cpu_kernels(self, format):
        store = self.fill(format)
        launches.clear()
        self.pooled(store, [[1]])
        self.step(store, PLAIN, [[1]], torch.ones(1, DIM))
        assert {key.split(".")[0] for key in launches} == {"cpu"}
        assert store.tier == "host"

    def test_bytes_are_counted(self, format):
        narrow = int(format.narrow().sum())
        expected = narrow * BYTES[format.dtype] + (SLOTS - narrow) * 4 * DIM
        store = self.fill(format)
        assert store.nbytes == expected
        store.add_moment(Moment("row", "row"))
        store.add_moment(Moment("element", "element"))
        assert store.nbytes == expected + SLOTS * 4 * (1 + DIM)

    def test_raw_and_moments_share_its_memory(self, format):
        store = self.fill(format)
        store.add_moment(Moment("element", "element"))
        for array in (store.raw(1)["weight"], store.moment(1, "element")):
            array.view(torch.uint8).fill_(1)
        assert (store.raw(1)["weight"].view(torch.uint8) == 1).all()
        assert (store.moment(1, "element").view(torch.uint8) == 1).all()


class TestDenseWithReferenceKernels(StoreContract):
    def make(self, spans, dim, dtype):
        return DenseStore(spans, dim, dtype=dtype, backend="reference")


class InPlace(StoreContract):
    """Rows in the host's memory that kernels read and write in place."""

    backend = "auto"

    def make(self, spans, dim, dtype):
        return Storage("host", host="uva").make(spans, dim, dtype=dtype, device=DEVICE, backend=self.backend)

    def test_it_is_a_dense_store_in_host_memory_with_the_bits_of_another(self, format):
        store, other = self.fill(format), DenseStore(format.spans, DIM, dtype=format.dtype, device=DEVICE)
        other.initialize(0, seed=5, rows=range(SLOTS), cols=range(DIM), bound=0.5)
        assert isinstance(store, DenseStore) and store.tier == "host" and store.device == other.device
        launches.clear()
        for one in (store, other):
            self.step(one, Adam.rule, [[3, 7], [3], [13, 20]], torch.ones(3, DIM))
        assert launches[f"{'triton' if self.backend == 'triton' or DEVICE.type == 'cuda' else 'cpu'}.update"] > 0
        assert stored_bits(store) == stored_bits(other)
        moments = [self.read_all(one, name) for name in ("exp_avg", "exp_avg_sq") for one in (store, other)]
        assert torch.equal(moments[0], moments[1]) and torch.equal(moments[2], moments[3])


class TestInPlace(InPlace):
    """With the kernels of the device."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="then Triton is the kernels of the device")
class TestInPlaceWithTriton(InPlace):
    few_formats = (Format("int8", (5, 8)),)
    backend = "triton"

    @pytest.fixture(params=[Format("fp32", (0, 0)), Format("int8", (5, 8))], ids=lambda f: f.dtype)
    def format(self, request):
        return request.param


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestDenseOnDevice(StoreContract):
    every_format = True

    def make(self, spans, dim, dtype):
        return DenseStore(spans, dim, dtype=dtype, device="cuda")

    def test_it_is_served_by_triton_and_moves_with_its_bits(self, format):
        store = self.fill(format)
        store.add_moment(Moment("element", "element"))
        store.fill(1, "element", 2.0)
        host = store.to(torch.device("cpu"))
        assert store.tier == "device" and host.tier == "host"
        assert stored_bits(store) == stored_bits(host)
        assert torch.equal(self.read_all(store, "element"), self.read_all(host, "element"))


@pytest.mark.parametrize("dtype", ["fp32", "int8", "fp8"])
def test_a_large_table_is_drawn_in_chunks_of_the_same_bits(dtype, monkeypatch):
    def rows():
        store = DenseStore([Span(50, 7)], 20, dtype=dtype)
        store.initialize(0, seed=3, rows=range(1, 101, 2), cols=range(20), bound=0.5)
        return {name: t.view(torch.uint8) for name, t in store.raw(0).items()}

    whole = rows()
    monkeypatch.setattr("hotbed.store.device_store.INITIAL_CHUNK", 9 * 20)
    for name, chunked in rows().items():
        assert torch.equal(chunked, whole[name]), name


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.sampled_from(["fp32", "bf16", "int8"]),
    st.data(),
)
def test_slots_are_initialized_together_as_one_by_one(counts, dtype, data):
    """Of any spans, some of whose rows are float32, from any slot on."""
    spans = [Span(rows, min(wide, rows)) for rows, wide in counts]
    stores = [DenseStore(spans, 17, dtype=dtype, backend="cpu") for _ in range(2)]
    slot = data.draw(st.integers(0, stores[0].slots))
    count = data.draw(st.integers(0, stores[0].slots - slot))
    stores[0].initialize(slot, seed=1, rows=range(3, 3 + 2 * count, 2), cols=range(17), bound=0.5)
    for i in range(count):
        stores[1].initialize(slot + i, seed=1, rows=range(3 + 2 * i, 4 + 2 * i), cols=range(17), bound=0.5)
    together, alone = (store.read(torch.arange(store.slots)) for store in stores)
    assert torch.equal(together, alone)
    assert not together[:slot].any()
    assert together[slot : slot + count].any(1).all()
    assert not together[slot + count :].any()


def test_an_exponent_never_falls():
    store = DenseStore([Span(1)], 4, dtype="int8")
    for scale, quantum in ((1.0, 2**-6), (8.0, 2**-3), (1.0, 2**-3)):
        store.write(torch.tensor([0]), scale * torch.tensor([[1.0, 0.3, -0.6, 0.0]]))
        assert store.raw(0)["exponents"].double().exp2().item() == quantum
    assert store.read(torch.tensor([0])).tolist() == [[1.0, 0.25, -0.625, 0.0]]


def test_large_arenas_are_zeroed_and_aligned_to_huge_pages():
    t = large_tensors.zeros((1100, 512))
    assert t.shape == (1100, 512) and not t.any()
    if t.nbytes >= large_tensors.HUGE_PAGE_BYTES:
        assert t.data_ptr() % large_tensors.HUGE_PAGE_BYTES == 0


def test_memory_comes_back_while_the_pool_is_in_use():
    class Cycle:
        pass

    cycle = Cycle()
    cycle.self, cycle.tensor = cycle, large_tensors.empty((1100, 512))
    del cycle
    with large_tensors._lock:
        gc.collect()  # gives the block back; it must not wait for the lock
    assert large_tensors.empty((1100, 512)).shape == (1100, 512)


def test_free_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(large_tensors, "MAX_FREE_BYTES", 10 << 20)
    del [large_tensors.empty((1100, 512)) for _ in range(8)][:]
    large_tensors.empty((1100, 512))
    assert sum(map(len, large_tensors._free)) <= 10 << 20


def test_results_reuse_memory_only_when_nothing_refers_to_it():
    gc.collect()
    large_tensors._returned.clear()
    large_tensors._free.clear()
    first = large_tensors.empty((1100, 512))
    address = first.data_ptr()
    view = first[5:]
    del first
    second = large_tensors.empty((1100, 512))
    assert second.data_ptr() != address
    del view
    third = large_tensors.empty((1100, 512))
    assert third.data_ptr() == address
    assert second.data_ptr() != third.data_ptr()
