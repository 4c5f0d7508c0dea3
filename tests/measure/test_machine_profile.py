"""A machine as it is measured: a profile that can be read, with a source and a spread for every figure; no times."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from rich.console import Console

from hotbed.cli.doctor import print_profile
from hotbed.cli.main import main
from hotbed.comm import Link
from hotbed.errors import RecipeError
from hotbed.measure import machine_profile, rank_exchanges, step_overheads
from hotbed.measure.machine_profile import MeasureOptions, disk_rates
from hotbed.measure.rank_exchanges import rates, seconds_per_message
from hotbed.measure.step_overheads import Measured, StepJob, StepSizes, averaged_rows, measure_overheads
from hotbed.plan.cost import CostModel
from hotbed.plan.hardware import DIMENSIONS, OVERHEADS, Hardware
from hotbed.plan.step_time import estimate_step
from tests.cli.cases import Output, refused
from tests.ranks import Ranks

STEPS = StepSizes(table_bytes=1 << 20, batch=64, slow_rows=100, steps=1, repeats=2)
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "TABLE_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(machine_profile, "DISK_BYTES", 1 << 20)
    monkeypatch.setattr(machine_profile, "QUICK_STEPS", STEPS)


@pytest.fixture
def instant_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of steps that nobody runs; `test_training_steps_are_measured` runs them."""

    def seconds(jobs: Sequence[StepJob], ranks: int, *, repeats: int, layers: Any, codecs: Any, **_: Any) -> Measured:
        by_job = [[1e-3 * (job.tables + job.batch)] * repeats for job in jobs]
        timed = {layer: [1e-4] * repeats for layer in layers}
        return Measured(steps=by_job, layers=timed, codecs={codec: [1e-9] * repeats for codec in codecs})

    monkeypatch.setattr(step_overheads, "step_seconds", seconds)


@pytest.mark.full
def test_training_steps_are_measured() -> None:
    found = measure_overheads([2], Hardware.load("epyc-7742x2"), STEPS, lambda stage: None)
    assert {ranks: len(repeats) for ranks, repeats in found["overheads"]["step"].items()} == {1: 2, 2: 2}
    assert set(found["overheads"]) == set(OVERHEADS)
    assert all(min(repeats) >= 0 for by_ranks in found["overheads"].values() for repeats in by_ranks.values())
    assert all(min(repeats) > 0 for by in found["mlp"].values() for repeats in by.values())


def test_what_a_row_takes_that_replicas_average_is_found_in_a_step() -> None:
    here = Hardware.load("epyc-7742x2").with_(cores_per_node=2, ranks_per_node=2)
    job = StepJob(tables=8, rows=(1000,), batch=64, replicas=2)

    def seconds(of_row: float) -> float:
        model = CostModel(job.workload(2), 1, here.with_(overheads={"step": {2: 1e-3}, "average_row": {2: of_row}}))
        plan = job.make_plan(2)
        return estimate_step(plan, model.ranks(plan), model).seconds

    known = here.with_(overheads={"step": {2: 1e-3}})
    assert averaged_rows(job, [seconds(2e-6), seconds(5e-6), 0.0], known, 2) == pytest.approx([2e-6, 5e-6, 0.0])


@pytest.mark.usefixtures("instant_steps")
def test_a_profile_is_written_and_read(tmp_path: Path, capsys: Output) -> None:
    file, figures_file = tmp_path / "hw.yaml", tmp_path / "doctor.json"
    argv = ["doctor", str(tmp_path), "--measure", str(file), "--quick", "--device", "cpu", "--json", str(figures_file)]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert f"profile: {file}" in captured.out
    assert "exchanges between 2 ranks" in captured.err
    written = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert written == json.loads(figures_file.read_text(), object_hook=_numbers)["profile"]
    for name, entry in written["figures"].items():
        assert name == "cores_shared" or entry["source"] in written["sources"], name
        assert name in captured.out
    assert written["figures"].keys() >= DIMENSIONS.keys() - {"network_efficiency", "oversubscription", "price_per_hour"}
    assert written["sources"]["disk"].endswith(("O_DIRECT", "measurement", "measured"))
    hardware = Hardware.load(file)
    assert (hardware.measured, hardware.cores_shared, hardware.ranks_per_node) == (True, True, 2)
    assert hardware.gather.keys() == hardware.scatter.keys() == {64, 512}
    assert hardware.flops.keys() == {"fp32", "bf16"}
    assert hardware.all_to_all[2].keys() == hardware.all_reduce[2].keys() == {1 << 10, 1 << 16, 1 << 20}
    assert hardware.network == hardware.node_link == max(hardware.all_to_all[2].values())
    assert hardware.overheads["table"] == {1: 1e-3, 2: 1e-3}
    assert hardware.overheads.keys() == set(OVERHEADS)
    assert hardware.efficiency.keys() == hardware.mlp.keys() == {1, 2}
    assert hardware.message_s == pytest.approx(1024 / hardware.all_to_all[2][1024], rel=2e-3)
    assert {path.name for path in tmp_path.iterdir()} == {"hw.yaml", "doctor.json"}  # the file on the disk is gone


def test_figures_that_differ_between_repeats_are_doubted(capsys: Output) -> None:
    figures = {
        "stream": {"value": "1 GB/s", "source": "measured", "spread": 0.51},
        "gather": {"value": {64: "1 GB/s", 512: "2 GB/s"}, "source": "measured", "spread": {64: 0.9, 512: 0.1}},
        "disk_bytes": {"value": 5 * 10**9, "source": "counted"},
        "cores_shared": True,
    }
    print_profile(Console(width=100), {"description": "a machine", "figures": figures})
    out = capsys.readouterr().out
    assert "2 of 3 figures differ by more than 50% between repeats" in " ".join(out.split())
    assert "gather 512" in out
    assert "5 GB" in out


def _numbers(values: dict[str, Any]) -> dict[Any, Any]:
    """JSON's keys are text."""
    return {int(key) if key.isdecimal() else key: value for key, value in values.items()}


def test_what_cannot_be_measured_is_refused(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--ranks: got [1], expected numbers of at least 2" in refused(
        ["doctor", "--measure", str(tmp_path / "hw.yaml"), "--ranks", "[1]"], capsys
    )
    assert f"--measure: got '{tmp_path}', which is a directory" in refused(
        ["doctor", "--measure", str(tmp_path)], capsys
    )
    assert "--quick works only with --measure" in refused(["doctor", "--quick"], capsys)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RecipeError, match=r"--ranks: got \[2, 4\], expected at most 1"):
        MeasureOptions(ranks=[2, 4]).worlds(CUDA)
    assert not list(tmp_path.iterdir())


def test_exchanges_are_measured_between_as_many_ranks_as_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, worlds in ((1, []), (2, [2]), (6, [2, 4]), (8, [2, 4, 8])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert MeasureOptions().worlds(CUDA) == worlds
    assert MeasureOptions(ranks=[3, 2]).worlds(torch.device("cpu")) == [2, 3]


def test_one_gpu_has_no_link_to_others() -> None:
    sources: dict[str, str] = {}
    figures = {"host_link": {"value": "25 GB/s"}, "launch_s": {"value": "5 us"}}
    found = machine_profile._exchanges([], CUDA, MeasureOptions(), figures, sources, lambda stage: None)
    assert {name: entry["value"] for name, entry in found.items()} == {
        "node_link": "25 GB/s",
        "network": "25 GB/s",
        "message_s": "5 us",
    }
    assert {entry["source"] for entry in found.values()} == sources.keys()


def test_rates_of_exchanges() -> None:
    assert rates("all_to_all", 4, {100: [2.0, 1.0]}) == {100: [150.0, 300.0]}
    assert rates("all_reduce", 4, {100: [2.0]}) == {100: [50.0]}
    assert seconds_per_message(3, {1: [4.0, 2.0], 8: [6.0]}) == [2.0, 1.0]


def exchanged(group: dist.ProcessGroup) -> dict[str, Any]:
    """On a rank: what every exchange gives, and how many seconds there are."""
    link, cpu = Link(), torch.device("cpu")
    job = {"repeats": 2, "device": "cpu"}
    seconds = {
        make.__name__: rank_exchanges._repeats(make(link, 64, cpu), link, 1 << 22, job)
        for make in (rank_exchanges._all_to_all, rank_exchanges._all_reduce)
    }
    return {"seconds": seconds, "sent": dict(link.sent_bytes)}


def test_exchanges_are_those_of_training(ranks: Ranks) -> None:
    found = ranks.run(3, exchanged)
    assert all(rank["seconds"] == found[0]["seconds"] for rank in found)  # those of the slowest
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found[0]["seconds"].values())
    calls = 1 + rank_exchanges.WARMUP + 2
    assert found[0]["sent"]["bytes"] == calls * 2 * 64
    assert "gradients of dense parameters" in found[0]["sent"]


def test_a_disk_is_read_with_a_file_that_is_removed(tmp_path: Path) -> None:
    found = disk_rates(tmp_path, 1 << 20, 2)
    assert len(found.read) == len(found.latency) == 2
    assert min(*found.read, *found.latency) > 0
    assert found.how
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="there are no direct reads here")
def test_a_file_system_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, direct = os.open, os.O_DIRECT

    def without(path: Any, flags: int, *mode: Any) -> int:
        if flags & direct:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *mode)

    monkeypatch.setattr(machine_profile.os, "open", without)
    assert disk_rates(tmp_path, 1 << 20, 1).how == "page cache dropped before each measurement"
    monkeypatch.delattr(machine_profile.os, "posix_fadvise")
    assert "through the page cache" in disk_rates(tmp_path, 1 << 20, 1).how


def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"the disk of .* cannot be measured with a file of 4,096 bytes \(No such file"
    ):
        disk_rates(tmp_path / "gone", 4096, 1)
