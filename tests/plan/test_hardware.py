"""Hardware profiles have units and sources, and one describes this machine: its memory, cores and ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hotbed import machine
from hotbed.errors import RecipeError
from hotbed.plan import hardware
from hotbed.plan.cost import HOST, CostModel
from hotbed.plan.hardware import (
    DIMENSIONS,
    PROFILES,
    UNITS,
    Hardware,
    format_quantity,
    interpolated,
    parse_quantity,
    profiles,
)
from hotbed.plan.limits import limits_of
from hotbed.plan.search import search
from hotbed.plan.tiling import Tier, Tile
from hotbed.plan.workload import Workload
from hotbed.specs import RowDtype, Table

FIGURES = {f.name for f in dataclasses.fields(Hardware)} - {"name", "description", "sources", "origins", "measured"}
SMALL: dict[str, Any] = {
    "ranks_per_node": 2,
    "device_bytes": "8 GB",
    "host_bytes": "16 GiB",
    "stream": "100 GB/s",
    "gather": {64: "10 GB/s", 256: "30 GB/s"},
    "scatter": {64: "5 GB/s"},
    "flops": {"fp32": "1 TFLOP/s"},
    "host_stream": 5e10,
    "host_link": "10 GB/s",
    "node_link": "20 GB/s",
    "network": "100 Gbit/s",
    "message_s": "5 us",
    "launch_s": 0,
    "cores_per_node": 4,
}


def write(folder: Path, figures: dict[str, Any], **top: Any) -> Path:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({"figures": figures, **top}))
    return file


@pytest.mark.parametrize("name", profiles())
def test_every_figure_of_a_built_in_profile_has_a_source(name: str) -> None:
    hardware = Hardware.load(name)
    assert (hardware.name, hardware.price_per_hour, hardware.measured) == (name, None, False)
    assert hardware.description
    own = yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8"))
    for key, entry in own["figures"].items():
        assert key == "cores_shared" or entry["source"], f"{name}: {key}"
    assert {"gather", "stream", "flops"} <= own["figures"].keys() or "extends" in own
    assert hardware.gather_rate(512) <= hardware.stream * 1.001
    for source in own["sources"]:  # each explains a figure
        assert any(text.startswith(f"{source}: ") for text in hardware.sources), source


def test_the_page_on_hardware_names_every_profile_and_figure() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
    for name in (*profiles(), *FIGURES):
        assert f"`{name}`" in page, name
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    ours = Hardware.from_dict(yaml.safe_load(example), "the example")
    assert (ours.price_per_hour, ours.network_efficiency, ours.oversubscription) == (31.5, 0.85, 2)
    assert ours.gather == Hardware.load("aws-p5-48xlarge").gather


def test_figures_are_those_of_the_class() -> None:
    assert DIMENSIONS.keys() | {"cores_shared"} == FIGURES


def test_a_node_is_its_gpu_in_another_host() -> None:
    amazon, dgx = Hardware.load("aws-p4d-24xlarge"), Hardware.load("a100-40")
    assert amazon.gather == dgx.gather
    assert amazon.network == 50e9 / 8 < dgx.network == 200e9 / 8
    assert dgx.stream == pytest.approx(0.84 * 1555e9)
    assert dgx.flops["bf16"] == pytest.approx(0.859 * 312e12)


def test_a_file_may_have_plain_figures(tmp_path: Path) -> None:
    hardware = Hardware.load(write(tmp_path, SMALL | {"all_to_all": {2: {4096: "1 GB/s"}}}))
    assert hardware.host_bytes == 16 << 30
    assert hardware.network == 12.5e9
    assert hardware.message_s == pytest.approx(5e-6)
    assert hardware.all_to_all == {2: {4096: 1e9}}
    assert hardware.disk_bytes == 0
    assert hardware.with_(price_per_hour=32.5).price_per_hour == 32.5


def test_curves_are_linear_in_the_logarithm_and_flat_outside(tmp_path: Path) -> None:
    hardware = Hardware.load(write(tmp_path, SMALL))
    assert [hardware.gather_rate(n) for n in (4, 64, 128, 256, 4096)] == pytest.approx([10e9, 10e9, 20e9, 30e9, 30e9])
    assert hardware.scatter_rate(512) == 5e9
    assert interpolated({8: 1.0}, 100) == 1.0


def test_figures_are_changed_for_sweeps(tmp_path: Path) -> None:
    hardware = Hardware.load(write(tmp_path, SMALL))
    assert hardware.with_(network=1e9).network == 1e9
    assert hardware.scaled("gather", 2).gather == {64: 20e9, 256: 60e9}
    assert hardware.scaled("device_bytes", 1 / 3).device_bytes == round(8e9 / 3)
    with pytest.raises(RecipeError, match=r"hardware: got 'netwrok', .*; did you mean 'network'\?"):
        hardware.with_(netwrok=1)
    with pytest.raises(RecipeError, match="hardware to scale: got 'name', expected one of ranks_per_node"):
        hardware.scaled("name", 2)
    with pytest.raises(RecipeError, match="price_per_hour: got none"):
        hardware.scaled("price_per_hour", 2)
    with pytest.raises(RecipeError, match=r"oversubscription: got 0.5, expected a finite number at least 1"):
        hardware.with_(oversubscription=0.5)


@pytest.mark.parametrize(
    ("figures", "top", "message"),
    [
        ({"stream": "fast"}, {}, r"figures.stream: got 'fast', expected a number of bytes/s, .* 1.3 TB/s"),
        ({"stream": "10 GB"}, {}, "figures.stream: got '10 GB', expected"),
        ({"stream": "1.2.3 GB/s"}, {}, "figures.stream: got '1.2.3 GB/s', expected"),
        ({"stream": True}, {}, "figures.stream: got True, expected"),
        ({"stream": 0}, {}, "stream: got 0.0, expected a finite number above 0"),
        ({"launch_s": "-1 us"}, {}, "launch_s: got -1e-06, expected a finite number at least 0"),
        ({"cores_per_node": 1.5}, {}, "cores_per_node: got 1.5, expected an integer"),
        ({"network_efficiency": 2}, {}, "network_efficiency: got 2.0, expected .* at most 1"),
        ({"strem": 1}, {}, r"figures: got 'strem', .*; did you mean 'stream'\?"),
        ({"stream": {"peak": "1 GB/s"}}, {}, "figures.stream: got peak, expected `value`, or `peak`"),
        (
            {"stream": {"peak": "1 GB/s", "share": 2}},
            {},
            "stream.share: got 2.0, expected .* above 0 and at most 1",
        ),
        ({"stream": {"value": 1, "src": "a"}}, {}, "figures.stream: got 'src', expected one of value, peak"),
        ({"stream": {"value": 1, "source": "a"}}, {}, "figures.stream.source: got 'a', expected none. Explain"),
        ({"stream": {}}, {}, "figures.stream: got nothing"),
        ({"gather": "1 GB/s"}, {}, "gather: got 1000000000.0, expected a mapping from a number of bytes to a number"),
        ({"gather": {}}, {}, "gather"),
        ({"gather": {"wide": 1}}, {}, "gather: got 'wide', expected an integer"),
        ({"gather": {64: 0}}, {}, r"gather.64: got 0.0, expected a finite number above 0"),
        ({"gather": {"peak": {64: 1}, "share": {32: 1}}}, {}, "figures.gather: got 32 in only one of"),
        ({"flops": {"fp8": 1}}, {}, r"flops: got 'fp8', expected one of fp32, tf32, bf16, fp16"),
        ({"all_to_all": {2: 5}}, {}, "all_to_all.2: got 5.0, expected a mapping from"),
        ({"cores_shared": 1}, {}, "cores_shared: got 1, expected true or false"),
        ({}, {"extends": "a100-4"}, r"extends: got 'a100-4', expected one of a100-40, .*; did you mean 'a100-40'\?"),
        ({}, {"figurs": {}}, r"key: got 'figurs', .*; did you mean 'figures'\?"),
        ({}, {"sources": []}, r"sources: got \[\], expected a mapping"),
        ({}, {"description": None}, "description: got None, expected text"),
        ({7: 1}, {}, "figures: got 7, expected one of"),
        ({"stream": {"value": 1, "source": [[]]}}, {}, r"figures.stream.source: got \[\], expected"),
        ({"all_to_all": {"peak": {2: {4: 1}}, "share": 1}}, {}, "figures.all_to_all: got peak, share"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, figures: dict[str, Any], top: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        Hardware.load(write(tmp_path, SMALL | figures, **top))
    assert "mine.yaml: " in str(refused.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"figures: expected also ranks_per_node, cores_per_node, .*`extends:`"):
        Hardware.load(write(tmp_path, {"stream": 1}))
    with pytest.raises(RecipeError, match=r"hardware profile: got 'h10', .*; did you mean 'h100'\?"):
        Hardware.load("h10")
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(RecipeError, match=r"list.yaml: a profile: got \[1\], expected a mapping"):
        Hardware.load(tmp_path / "list.yaml")


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["1 GB/s", "a", "5 us", "", "fp32"])
KEYS = st.sampled_from(["value", "peak", "share", "source", "fp32", 64, 2, 0, -1])
ENTRIES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3))


@given(st.dictionaries(st.sampled_from(sorted(FIGURES)), ENTRIES), st.dictionaries(KEYS | st.just("extends"), ENTRIES))
def test_whatever_a_file_holds_is_a_profile_or_one_error(figures: dict[str, Any], top: dict[Any, Any]) -> None:
    with contextlib.suppress(RecipeError):
        Hardware.from_dict({"figures": SMALL | figures, "sources": {"a": "b"}, **top}, "mine")


@pytest.mark.parametrize("dimension", [d for d in UNITS if UNITS[d]])
@pytest.mark.parametrize("value", [3e-5, 0.5, 1.0, 999.0, 123456.0, 7.125e13])
def test_a_quantity_that_is_shown_is_read_again(dimension: Any, value: float) -> None:
    assert parse_quantity("value", format_quantity(value, dimension), dimension) == pytest.approx(value, rel=1e-3)


def test_units() -> None:
    assert parse_quantity("link", "200 Gbit/s", "bytes/s") == 25e9
    assert parse_quantity("memory", "1.5GiB", "bytes") == 1.5 * 2**30
    assert parse_quantity("latency", " 4 ms ", "s") == 4e-3
    assert (format_quantity(1.6e12, "bytes/s"), format_quantity(5e-6, "s"), format_quantity(8, "number")) == (
        "1.6 TB/s",
        "5 us",
        "8",
    )


# -- The machine that this is: its memory within control groups, its cores, and what ranks of a

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
