"""The machine that this is: its memory within control groups, its cores, and what ranks of a node share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hotbed import machine
from hotbed.errors import RecipeError
from hotbed.plan import hardware
from hotbed.plan.cost import HOST, CostModel
from hotbed.plan.hardware import Hardware
from hotbed.plan.limits import limits_of
from hotbed.plan.search import search
from hotbed.plan.tiling import Tier, Tile
from hotbed.plan.workload import Workload
from hotbed.specs import RowDtype, Table

CPU = Hardware.load("epyc-7742x2").with_(ranks_per_node=2)


@pytest.mark.parametrize(
    ("cgroup", "file", "limit", "found"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.max", "1048576", 1 << 20),
        ("0::/job", "sys/fs/cgroup/memory.max", "2097152", 2 << 20),
        ("0::/job", "sys/fs/cgroup/job/memory.max", "max", 8 << 20),
        ("4:memory:/job", "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "3145728", 3 << 20),
        ("4:memory:/job", "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712", 8 << 20),
    ],
)
def test_memory_is_at_most_what_control_groups_grant(tmp_path: Path, cgroup: str, file: str, limit: str, found: int):
    for name, text in {"proc/meminfo": "MemTotal: 8192 kB", "proc/self/cgroup": cgroup, file: limit}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.memory_bytes(tmp_path) == found


def test_fewer_cores_are_slower_and_more_ranks_share_the_network(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 5 << 30)
    found: dict[tuple[int, int], Hardware] = {}
    for cores in (2, 128):
        for ranks in (1, 4):
            monkeypatch.setattr(hardware, "usable_cores", lambda cores=cores: cores)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
            found[cores, ranks] = hardware.hardware_here(torch.device("cpu"))
    few, many = found[2, 1], found[128, 1]
    assert few.device_bytes == few.host_bytes == 5 << 30
    assert few.gather_rate(256) * 64 == pytest.approx(many.gather_rate(256))
    assert found[2, 4].network * 4 == pytest.approx(few.network)
    work = Workload.of([Table("t", 1000, 64)], batch_size=1024)
    assert search(work, 1, few).load > 10 * search(work, 1, many).load


def test_on_cpus_the_host_has_what_a_limit_of_device_memory_leaves():
    work = Workload.of([Table("x", 10_000_000, 64)], batch_size=8192)
    found = search(work, 2, CPU, capacity_bytes=100 << 20, tiers=("device", "host"))
    assert {tile.tier for tile in found.plan.tiles} == {"device", "host"} and found.gap >= -1e-9
    model = CostModel(work, 2, CPU)
    assert limits_of(model).room["host"] == 0
    assert 0 < limits_of(model, 100 << 20).room["host"] < CPU.host_bytes - 2 * (100 << 20)
    assert limits_of(model, 100 << 20, 1 << 20).room["host"] == 2 << 20


def test_a_cache_before_slower_memory_is_in_plan_and_costs():
    def found(cache_rows: int, cached: tuple[Tier, ...] = ("host", "disk"), dtype: RowDtype = "bf16"):  # type: ignore[no-untyped-def]
        work, tiers = Workload.of([Table("x", 1_000_000, 64, dtype=dtype)], batch_size=8192), ("device", "host")
        return search(work, 2, CPU, capacity_bytes=1 << 20, tiers=tiers, cache_rows=cache_rows, cached=cached)

    for rank in range(2):
        rows = [t.cache_rows for t in found(10_000).plan.tiles if t.owner == rank]
        assert 10_000 <= sum(rows) <= 10_000 + len(rows)
    assert found(10_000).load < found(0).load and found(10_000).gap >= -1e-9
    assert {t.cache_rows for t in found(10, ("disk",)).plan.tiles} == {0}
    assert found(10_000, dtype="fp32").load > found(0, dtype="fp32").load  # which are updated where they are


@pytest.mark.parametrize(("dtype", "hardware", "is_copied"), [
    ("fp32", CPU, False), ("bf16", CPU, True), ("fp32", Hardware.load("h100"), True)
])  # fmt: skip
def test_float32_rows_of_the_hosts_memory_cost_cores_what_rows_of_the_devices_do(
    dtype: RowDtype, hardware: Hardware, is_copied: bool
):
    model = CostModel(Workload.of([Table("x", 1000, 64, dtype=dtype)], batch_size=64), 1, hardware)
    tile = Tile("x", range(1000), range(64), 0)
    device, host = (model.tile(replace(tile, tier=tier)) for tier in ("device", "host"))
    assert (host.owner.sum() > device.owner.sum()) == is_copied and host.owner_bytes[HOST] > 0


def test_disks_without_a_rate_are_refused():
    with pytest.raises(RecipeError, match=r"disk_read: got 0 with disk_bytes 1,000"):
        CPU.with_(disk_bytes=1000, disk_read=0.0)
    assert CPU.with_(disk_bytes=0, disk_read=0.0).disk_bytes == 0
