"""Every benchmark can be imported; that of GPUs also where only what it needs is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from benchmarks.kernels.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if ".venv" not in path.parts
)
PEERS = ("torchrec", "fbgemm_gpu", "triton")
"""Packages that some benchmarks import and not every machine has."""
UNNEEDED = (
    *("pyarrow", "polars", "hypothesis", "xdist", "moto", "boto3", "obstore"),
    *("scipy", "optuna", "matplotlib", "tensorboard", "pandas"),
)
"""What is installed with hotbed or its tests, and the GPU suite does without."""
BLOCK = """
import importlib.util
import sys


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


sys.meta_path.insert(0, Block())
found = importlib.util.find_spec  # by which others ask whether a package is there
importlib.util.find_spec = lambda name, of=None: None if name.split(".")[0] in BLOCKED else found(name, of)
"""


@pytest.mark.parametrize("module", MODULES)
def test_it_can_be_imported(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in PEERS:
            raise
        pytest.skip(f"needs {error.name}")


def test_kernels_and_steps_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.measure.machine_profile.EVICT_BYTES", 1 << 16)
    monkeypatch.setattr("hotbed.measure.machine_profile.COPY_BYTES", 1 << 16)
    sizes = ["--tables", "2", "--rows", "[60,7]", "--dim", "8", "--batch_size", "6", "--repeats", "1"]
    main(["step", *sizes, "--optimizer", "Adam", "--device", "cpu", "--json", str(tmp_path / "step.json")])
    assert '"roofline"' in (tmp_path / "step.json").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["ops", "--help"])


def test_the_gpu_suite_can_be_imported_without_what_it_does_not_need(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"BLOCKED = {UNNEEDED!r}\n{BLOCK}", encoding="utf-8")
    modules = [gpu_suite.FUNCTIONS.get(part, (f"benchmarks.gpu_{part}",))[0] for part in gpu_suite.PARTS]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", "\n".join(f"import {module}" for module in modules)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
