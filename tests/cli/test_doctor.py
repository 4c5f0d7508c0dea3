"""``hotbed doctor`` says what is there, what is missing and what to do, and never fails where something is missing."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotbed.cli import doctor
from hotbed.cli.doctor import Check
from hotbed.cli.main import main
from hotbed.ops import cpu_runtime
from tests.cli.cases import Output


def test_it_prints_what_is_there_and_writes_it(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "doctor.json"
    assert main(["doctor", str(tmp_path), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    found = {check["what"]: check for check in json.loads(file.read_text())["checks"]}
    for what in ("hotbed", "processor", "torch", "numba", "compiler cache", "backends", "GPU", "collectives", "disk"):
        assert found[what]["found"] in out
        assert found[what]["state"] in ("ok", "absent", "problem")
    assert found["numba"]["state"] == found["torch"]["state"] == "ok"
    assert "cpu on cpu" in found["backends"]["found"]
    assert str(tmp_path) in found["disk"]["found"]
    assert all(check["advice"] for check in found.values() if check["state"] == "problem")


def test_a_torch_that_cannot_be_imported_is_told(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the command starts without torch is in test_main.py."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert "ModuleNotFoundError: import of torch halted" in shown.out
    assert "✓ disk" in shown.out and "problems, marked" in shown.out


@pytest.mark.parametrize(
    ("text", "state"),
    [("always [madvise] never", "ok"), ("[always] madvise never", "ok"), ("always [never]", "problem")],
)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has them")
def test_huge_pages(tmp_path: Path, text: str, state: str) -> None:
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    check = Check("", *doctor._huge_pages(tmp_path))
    assert check.state == state
    assert ("echo madvise" in check.advice) == (state == "problem")
    assert Check("", *doctor._huge_pages(tmp_path / "none")).state == "absent"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_runtime, "_CACHE_DIR", tmp_path)  # elsewhere than it should be
    check = Check("", *doctor._cache())
    assert (check.state, "NUMBA_CACHE_DIR" in check.advice) == ("problem", True)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert "is empty" in Check("", *doctor._cache()).found
    (tmp_path / "lookup.nbi").touch()
    assert Check("", *doctor._cache()).found == f"1 kernels in {tmp_path}"


def test_openmp_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_runtime.numba.config, "THREADING_LAYER", "workqueue")
    check = Check("", *doctor._numba())
    assert (check.state, "libgomp1" in check.advice) == ("problem", True)


def test_triton_and_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert Check("", *doctor._triton()).state == "absent"
    monkeypatch.setattr(doctor, "_version", lambda package: "3.6.0")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
    check = Check("", *doctor._triton())
    assert (check.state, "without a C compiler" in check.found) == ("problem", True)
    assert "apt-get install gcc" in check.advice
    monkeypatch.setattr(doctor, "_has_gpu", lambda: False)
    assert Check("", *doctor._triton()).state == "ok"


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build" in Check("", *doctor._gpus()).advice
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert Check("", *doctor._gpus()).found == "a GPU exists, but torch 12.8 cannot use it"


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=141e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    assert Check("", *doctor._gpus()).found == "2: NVIDIA H200 (141 GB), NVIDIA H200 (141 GB); driver 580.1"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "no NCCL" in Check("", *doctor._collectives()).found


def test_a_disk_with_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=1 << 30, total=1 << 40)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    check = Check("", *doctor._disk(tmp_path / "not" / "there"))
    assert (check.state, str(tmp_path) in check.found) == ("problem", True)


def test_extras_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {
        "hotbed": [
            "torch>=2.9",
            'obstore>=0.8; extra == "remote"',
            'nothing-such>=1; extra == "remote"',
            'completer[shtab]>=4.48; extra == "completion"',
            'pytest>=8; extra == "testing"',
            'hotbed[remote]; extra == "dev"',
        ],
        "completer": ['shtab>=1.7; extra == "shtab"'],
    }
    versions = {"obstore": "0.8", "completer": "4.5", "shtab": "1.7"}
    monkeypatch.setattr(doctor.metadata, "requires", lambda package: required[package])
    monkeypatch.setattr(doctor, "_version", versions.get)
    completion, remote = doctor._extras()
    assert (completion.state, completion.found) == ("ok", "completer 4.5, shtab 1.7")
    assert (remote.state, remote.found) == ("absent", "without nothing-such")
    assert remote.advice == "pip install 'hotbed[remote]'"
