"""Rows that are materialized on their first update have the bits of a dense store, wherever they are kept.

In memory, in files, behind caches of any size and either policy, and staged as for a device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.errors import StoreError
from hotbed.ops import BackendName, Occurrences, RuleStep, launches
from hotbed.optim import Adam, Moment, RowWiseAdagrad
from hotbed.optim.sgd import PLAIN
from hotbed.specs import RowDtype
from hotbed.store import DenseStore, LazyStore, Span, Storage
from hotbed.store.tiers import RECORDS
from hotbed.testing.store_contract import OWN, Format, StoreContract
from tests.matrix import full

STORAGES = {
    **{tier: Storage(tier) for tier in RECORDS},
    "host-lru": Storage("host", cache_rows=5),
    "disk-lru": Storage("disk", cache_rows=7),
    "disk-lfu": Storage("disk", cache_rows=7, policy="lfu"),
    "disk-cache-of-all": Storage("disk", cache_rows=1000),
}


CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class LazyContract(StoreContract):
    backend: BackendName = "auto"
    kernels = "cpu"
    device = torch.device("cpu")

    @pytest.fixture(autouse=True)
    def _storage(self, storage: Storage) -> None:
        self.storage = storage

    def make(self, spans: Any, dim: int, dtype: RowDtype) -> Any:
        return self.storage.make(spans, dim, dtype=dtype, device=self.device, backend=self.backend)

    def test_one_backend_serves_all_of_it(self, format: Any, storage: Storage) -> None:
        launches.clear()
        store = self.fill(format)
        self.pooled(store, [[1]])
        self.step(store, PLAIN, [[1]], torch.ones(1, self.dim))
        assert {key.split(".")[0] for key in launches} == {self.kernels}
        of_cache = {key.split(".")[1] for key in launches if "cache" in key}
        every = {"cache_find", "cache_read", "cache_use", "cache_take", "cache_write"}
        assert of_cache == (every if storage.cache_rows else set())
        assert store.tier == storage.tier
        assert (store.disk_bytes > 0) == (storage.tier == "disk" and storage.cache_rows < 40)


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
class TestLazy(LazyContract):
    """With Numba."""

    every_format = STORAGES["disk-lru"]


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("storage", [Storage("host"), STORAGES["disk-lru"]], ids=["host", "disk-lru"])
class TestLazyOfFewColumns(LazyContract):
    """Rows of fewer bytes than a word, of which torch says that columns may have any stride where there is one."""

    few_formats = (Format("bf16", (5, 8)),)

    @pytest.fixture(autouse=True)
    def _dim(self, dim: int) -> None:
        self.dim = dim


CACHED = {name: storage for name, storage in STORAGES.items() if storage.cache_rows}


@pytest.mark.parametrize(
    "storage", [s if name in ("disk-lru", "disk-lfu") else full(s) for name, s in CACHED.items()], ids=CACHED
)
class TestLazyAsOnDevice(LazyContract):
    """With Triton, and records staged between the host's memory and the cache's, page-locked if there is CUDA."""

    every_format, few_formats = STORAGES["disk-lru"], (Format("int8", (5, 8)),)
    backend: BackendName = "triton"
    kernels = "triton"
    device = DEVICE

    @pytest.fixture(params=[Format("fp32", (0, 0)), Format("int8", (5, 8))], ids=lambda f: f.dtype)
    def format(self, request: pytest.FixtureRequest) -> Format:
        return request.param

    @pytest.fixture(autouse=True)
    def _staging(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hotbed.store.row_cache.needs_staging", lambda _: True)


SPANS = [Span(9, 2, 5, 2, 0), Span(30, 0, 100, 1, 0), Span(21, 21, 0, 3, 0)]


def made(
    storage: Storage | None,
    dtype: RowDtype,
    moments: list[Moment],
    backend: BackendName = "auto",
    where: torch.device = CPU,
) -> Any:
    store = (storage or Storage()).make(SPANS, 16, dtype=dtype, device=where, backend=backend)
    for i, (first, span) in enumerate(zip((0, 9, 39), SPANS, strict=True)):
        last = span.first_row + span.rows * span.row_step
        store.initialize(
            first, seed=i + 3, rows=range(span.first_row, last, span.row_step), cols=range(16), bound=0.5 + i
        )
    for moment in moments:
        store.add_moment(moment)
        for span in range(3):
            store.fill(span, moment.name, 0.25 * span)
    return store


def everything(store: Any, moments: list[Moment]) -> list[Any]:
    found: list[Any] = []
    for span in range(3):
        raw = store.raw(span).items()
        found += [(name, t.contiguous().view(-1).view(torch.uint8).tolist()) for name, t in raw]
        found += [store.moment(span, m.name).tolist() for m in moments]
    return found


def step_of(rule: Any, number: int, device: torch.device | str = "cpu") -> RuleStep:
    own = OWN[rule.name]
    common = [0.1, torch.inf, torch.inf, 0.0, 0.0]
    active = [1.0, 1.0, float(number % 3 > 0)]
    return RuleStep(
        rule=rule,
        hyper=torch.tensor([[a, *common, *own] for a in active], device=device),
        seeds=torch.tensor([number, number + 1, number + 2], device=device),
        uses=frozenset(),
        inv_scale=torch.ones((), device=device),
        gate=torch.tensor(1.0, device=device),
    )


def drive(store: Any, rule: Any, actions: list[tuple[str, list[int]]]) -> list[Any]:
    """What an access sequence reads."""
    seen: list[Any] = []
    draw = torch.Generator().manual_seed(1)
    for number, (action, slots) in enumerate(actions):
        at = torch.tensor(slots, dtype=torch.int64, device=store.device)
        if action == "lookup":
            seen.append(store.read(at).tolist())
        elif action == "ahead":
            store.prefetch(at)
        elif action == "write":
            distinct = at.unique()
            store.write(distinct, torch.randn(len(distinct), 16, generator=draw).to(store.device))
        else:
            grad = torch.randn(len(slots), 16, generator=draw).to(store.device)
            bags = torch.arange(len(slots), device=store.device)
            step, found = step_of(rule, number, store.device), Occurrences(at, bags, None)
            if action == "update of parts" and rule.name == "rowwise_adagrad":  # others have more columns of these rows
                step = replace(step, mean_squares=torch.rand(len(slots), generator=draw).to(store.device))
                found = replace(found, groups=store.ops.group(replace(found, limit=60)))
            store.update(step, found, grad)
    return seen


ACCESSES = st.lists(
    st.tuples(
        st.sampled_from(["lookup", "ahead", "write", "update", "update of parts"]),
        st.lists(st.integers(0, 59), min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(list(STORAGES)),
    st.sampled_from(["fp32", "bf16", "int8"]),
    st.sampled_from([PLAIN, RowWiseAdagrad.rule, Adam.rule]),
    ACCESSES,
)
def test_any_accesses_have_the_bits_of_a_dense_store(
    monkeypatch: pytest.MonkeyPatch,
    backend: BackendName,
    name: str,
    dtype: RowDtype,
    rule: Any,
    actions: list[tuple[str, list[int]]],
) -> None:
    """With Numba, and with Triton, where records are staged between the host's memory and the cache's."""
    device, moments = CPU, list(rule.moments)
    if backend == "triton":
        monkeypatch.setattr("hotbed.store.row_cache.needs_staging", lambda _: True)
        device = DEVICE
        name = name if name in CACHED else "disk-lru"
    lazy, dense = made(STORAGES[name], dtype, moments, backend, device), made(None, dtype, moments)
    assert isinstance(lazy, LazyStore) and isinstance(dense, DenseStore)
    assert drive(lazy, rule, actions) == drive(dense, rule, actions)
    assert everything(lazy, moments) == everything(dense, moments)


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_only_rows_that_were_trained_exist(storage: Storage) -> None:
    huge = storage.make([Span(1 << 40)], 16, dtype="fp32", device=CPU, backend="auto")
    huge.initialize(0, seed=1, rows=range(1 << 40), cols=range(16), bound=0.1)
    assert isinstance(huge, LazyStore)
    wanted = torch.tensor([0, (1 << 40) - 1, 77])
    before = huge.read(wanted)
    assert before.abs().max() <= 0.1 and before.any()
    assert not len(huge.keys(0))
    huge.update(step_of(PLAIN, 1), Occurrences(wanted[1:], torch.arange(2), None), torch.ones(2, 16))
    assert huge.keys(0)[:].tolist() == [77, (1 << 40) - 1]
    after = huge.read(wanted)
    assert torch.equal(after[0], before[0])
    assert torch.allclose(after[1:], before[1:] - 0.1)
    assert huge.nbytes < 1 << 20
    with pytest.raises(StoreError, match=r"got [\d,]+ bytes, expected at most 68,719,476,736"):
        huge.raw(0)


def test_moments_can_come_later_and_again() -> None:
    for storage in STORAGES.values():
        store, dense = made(storage, "int8", []), made(None, "int8", [])
        for one in (store, dense):
            drive(one, PLAIN, [("update", [3, 17, 17, 50])])
            for moment in (Moment("row", "row"), Moment("element", "element")):
                one.add_moment(moment)
                one.fill(1, moment.name, 2.0)
                one.add_moment(moment)
        moments = [Moment("row", "row"), Moment("element", "element")]
        assert everything(store, moments) == everything(dense, moments)


def test_what_a_cache_did_is_counted(tmp_path: Path) -> None:
    storage = Storage("disk", cache_rows=32, directory=tmp_path)
    store: Any = storage.make([Span(1000)], 16, dtype="fp32", device=CPU, backend="auto")
    store.initialize(0, seed=1, rows=range(1000), cols=range(16), bound=0.1)
    store.write(torch.arange(64), torch.ones(64, 16))  # 32 are kept
    assert store.traffic.misses == store.traffic.hits == 0  # only lookups count
    store.read(torch.arange(64))
    assert store.traffic.misses == store.traffic.hits == 32
    store.prefetch(torch.arange(200))
    store.read(torch.arange(40))
    assert store.traffic.ahead > 0
    assert store.traffic.written_bytes >= 32 * 64
    assert 0 < store.traffic.hit_rate < 1
    assert not list(tmp_path.iterdir())  # the file has no name, so a killed process leaves none


def test_what_a_cache_served_is_counted_by_table(tmp_path: Path) -> None:
    def made(cache_rows: int) -> Any:
        spans = [Span(1000), Span(500)]
        storage = Storage("disk", cache_rows=cache_rows, directory=tmp_path)
        return storage.make(spans, 16, dtype="fp32", device=torch.device("cpu"), backend="auto")

    assert made(0).served == []
    store = made(64)
    store.write(torch.arange(980, 1010), torch.ones(30, 16))
    assert store.served == [[0, 0], [0, 0]]
    store.read(torch.arange(975, 1012))
    assert store.served == [[20, 5], [10, 2]]
    store.add_moment(Moment("row", "row"))  # makes new records, whose cache is empty
    store.read(torch.arange(999, 1001))
    assert sum(hits + misses for hits, misses in store.served) == 2


def test_a_cache_moves_with_its_store_unless_it_is_the_hosts() -> None:
    meta = torch.device("meta")
    store = made(Storage("disk", cache_rows=7), "int8", []).to(meta)
    assert store.records.device == meta and store.records.layers()[1].device == CPU
    store = made(Storage("disk", cache_rows=7, cache_tier="host"), "int8", []).to(meta)
    assert store.records.device == CPU and store.device == meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("storage", CACHED.values(), ids=CACHED)
def test_a_store_moves_to_the_device_with_its_cache(storage: Storage) -> None:
    moments = list(Adam.rule.moments)
    store = made(storage, "int8", moments)
    actions = [("update", [1, 40, 7]), ("lookup", [0, 1])]
    seen = drive(store, Adam.rule, actions)
    before = everything(store, moments)
    assert store.to(DEVICE) is store and store.records.device == DEVICE
    assert everything(store, moments) == before
    assert drive(store, Adam.rule, actions[1:]) == seen
    assert store.traffic.to_device_bytes > 0
