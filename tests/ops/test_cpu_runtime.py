"""How the Numba kernels are started and kept, in fresh processes."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import hotbed
from hotbed.ops import cpu

LOOK = "import hotbed.ops.cpu, hotbed.ops.cpu_runtime as r; print(r._CACHE_DIR); print(r.numba.config.THREADING_LAYER)"


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )


def test_compiled_kernels_are_kept_under_a_hash_of_their_sources(tmp_path):
    found = python(LOOK, XDG_CACHE_HOME=str(tmp_path))
    assert found.stdout.startswith(str(tmp_path / "hotbed" / "numba-"))
    assert "omp" in found.stdout


def test_a_read_only_cache_is_said_and_replaced(tmp_path):
    (tmp_path / "file").write_text("")
    found = python(LOOK, XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    assert found.stdout.startswith(str(tmp_path / "hotbed-"))
    assert "kernels are compiled anew by every process" in found.stderr


def test_without_openmp_launches_take_turns_and_say_so():
    code = LOOK + "; import threading; print(isinstance(r._turns, type(threading.Lock())))"
    found = python(code, NUMBA_THREADING_LAYER="workqueue")
    assert found.stdout.endswith("True\n")
    assert "take turns" in found.stderr


def test_two_threads_may_launch_kernels_at_once():
    results: dict[int, torch.Tensor] = {}

    def fill(i: int) -> None:
        for _ in range(50):
            results[i] = torch.empty(300, 16)
            cpu.initial_values_(results[i], seed=1, rows=range(300), cols=range(16), bound=1.0)

    threads = [threading.Thread(target=fill, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[0], r) for r in results.values())


FILL = """
import torch

import hotbed
from hotbed.ops import cpu
cpu.initial_values_(torch.empty(2, 2), seed=1, rows=range(2), cols=range(2), bound=1.0)
"""


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
def test_kernels_are_compiled_once_and_again_when_a_helper_is_edited(tmp_path, variable):
    """Numba's own cache would not notice: the kernel's file stays as it is, and only a helper's changes."""
    shutil.copytree(Path(hotbed.__file__).parent, tmp_path / "hotbed", ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PYTHONPATH": str(tmp_path), variable: str(tmp_path / "cache")}

    def compiles() -> bool:
        return "compiling CPU kernels, once" in python(FILL, **env).stderr

    assert compiles()
    assert not compiles()
    helper = tmp_path / "hotbed" / "ops" / "cpu_hash.py"
    helper.write_text(helper.read_text() + "\n# edited\n")
    assert compiles()


def test_a_launch_leaves_the_number_of_threads_as_the_user_set_it():
    code = FILL + "import numba; print(torch.get_num_threads(), numba.get_num_threads())"
    assert python(code, OMP_NUM_THREADS="1").stdout == "1 1\n"
    set_later = FILL.replace("import torch", "import torch; torch.set_num_threads(1)")
    assert python(set_later + "print(torch.get_num_threads())", OMP_NUM_THREADS="2").stdout == "1\n"
