"""Test that kernels are compiled ahead, and that nothing that trains compiles any after that."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hotbed.ops import cpu_runtime


def test_what_was_compiled_is_said_and_the_second_time_it_is_nothing(tmp_path: Path) -> None:
    own = tmp_path / "hotbed" / cpu_runtime._CACHE_DIR.name  # other processes may fill the usual one meanwhile
    own.mkdir(parents=True)
    for file in cpu_runtime._CACHE_DIR.glob("*.nb[ci]"):
        shutil.copy(file, own)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-m", "hotbed", "warm-up", "--json", str(tmp_path / "found.json")]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=True)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["compiled"] == 0
    assert found["folder"] == str(own)
    assert len(list(own.glob("*.nbc"))) == found["kept"] > 40
    assert f"0 of {found['kept']} compiled kernels are new" in done.stdout


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    environment = {**os.environ, "XDG_CACHE_HOME": str(file)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-m", "hotbed", "warm-up"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"{file}/hotbed is not writable, so every process compiles kernels again. Set XDG_CACHE_HOME" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_after_it_training_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("NUMBA_CACHE_DIR", None)

    def hotbed(*args: str) -> set[Path]:
        command = [sys.executable, "-m", "hotbed", *args]
        subprocess.run(command, env=environment, cwd=tmp_path, timeout=600, check=True, capture_output=True)
        return set((tmp_path / "cache").rglob("*.nbc"))

    kept = hotbed("warm-up")
    assert len(kept) > 40
    assert hotbed("demo", "--samples", "2000") == kept
