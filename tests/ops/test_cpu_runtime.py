"""How the Numba kernels are started and kept, in fresh processes."""

import ast
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import hotbed
from hotbed.ops import cpu, cpu_runtime
from tests.matrix import full

SOURCE = Path(hotbed.__file__).parents[1]
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
    assert "every process compiles kernels again" in found.stderr


def test_without_openmp_launches_take_turns_and_say_so():
    code = LOOK + "; import threading; print(isinstance(r._turns, type(threading.Lock())))"
    found = python(code, NUMBA_THREADING_LAYER="workqueue")
    assert found.stdout.endswith("True\n")
    assert "a lock serializes kernels" in found.stderr


FORKED = """
import multiprocessing, sys, torch, hotbed as hb
make = lambda: hb.EmbeddingCollection([hb.Table("t", 9, 4)], [hb.Feature("f", table="t")])
ids = hb.Jagged.from_dict({"f": torch.tensor([1, 2])})
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, i): return made(ids)["f"].detach()
def look_up():
    try: print(made(ids)["f"].shape if made else make()(ids)["f"].shape, flush=True)
    except hb.HotbedError as error: print(type(error).__name__, error, flush=True)
made = make() if sys.argv[1] == "after" else None
if made: look_up()
process = multiprocessing.get_context("fork").Process(target=look_up)
process.start(); process.join(); print("ended by", process.exitcode)
if made:
    try: next(iter(torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="fork")))
    except hb.HotbedError as error: print("in a worker", type(error).__name__)
"""


def said_in_forks(when: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, when], capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have an OpenMP that survives a fork")
def test_kernels_in_a_forked_process_say_how_to_start_it():
    looked_up, refused, ended, in_worker = said_in_forks("after")
    assert looked_up == "torch.Size([2, 4])" and ended == "ended by 0" and in_worker == "in a worker BackendError"
    assert refused.startswith("BackendError this process was forked after kernels ran")
    assert "multiprocessing.get_context('spawn') or DataLoader(…, multiprocessing_context='spawn')" in refused


@pytest.mark.full
def test_a_process_that_is_forked_before_kernels_ran_runs_them():
    assert said_in_forks("before") == ["torch.Size([2, 4])", "ended by 0"]


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
from hotbed.ops import cpu, cpu_runtime
cpu.initial_values_(torch.empty(2, 2), seed=1, rows=range(2), cols=range(2), bound=1.0)
"""


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", full("NUMBA_CACHE_DIR")])
def test_kernels_are_compiled_once_for_all_copies_and_again_when_a_helper_is_edited(tmp_path, variable):
    """Numba's own cache would not notice: the kernel's file stays as it is, and only a helper's changes."""
    ignore = shutil.ignore_patterns("__pycache__")

    def compiles(folder: str) -> bool:
        env = {"PYTHONPATH": str(tmp_path / folder), variable: str(tmp_path / "cache")}
        return "compiling CPU kernels once" in python(FILL, **env).stderr

    shutil.copytree(SOURCE / "hotbed", tmp_path / "one" / "hotbed", ignore=ignore)
    assert compiles("one")
    shutil.copytree(SOURCE / "hotbed", tmp_path / "other" / "hotbed", ignore=ignore, copy_function=shutil.copyfile)
    assert not compiles("other")
    helper = tmp_path / "other" / "hotbed" / "ops" / "cpu_instructions.py"
    helper.write_text(helper.read_text() + "\n# edited\n")
    assert compiles("other")


def test_a_launch_leaves_the_number_of_threads_as_the_user_set_it():
    code = FILL + "import numba; print(torch.get_num_threads(), numba.get_num_threads())"
    assert python(code, OMP_NUM_THREADS="1").stdout == "1 1\n"
    set_later = FILL.replace("import torch", "import torch; torch.set_num_threads(1)")
    assert python(set_later + "print(torch.get_num_threads())", OMP_NUM_THREADS="2").stdout == "1\n"


WAITED_FOR = """
import fcntl, os
from numba.core import event
from hotbed.ops.cpu_runtime import kernel

@kernel()
def double(x):
    return 2 * x

told, go_on = os.pipe(), os.pipe()
lock = fcntl.lockf

def tell_and_lock(*args):
    os.write(told[1], b"l")
    lock(*args)

class Pause(event.Listener):
    def on_start(self, _):
        os.write(told[1], b"c")
        os.read(go_on[0], 1)

    def on_end(self, _):
        pass

def run():
    if os.fork() == 0:
        found = double(21)
        counts = [sum(of_cache.values()) for of_cache in (double.stats.cache_hits, double.stats.cache_misses)]
        os.write(1, f"{found} {counts[0]} {counts[1]}".encode() + bytes([10]))
        os._exit(0)

fcntl.lockf = tell_and_lock
event.register("numba:compile", Pause())
run()
while os.read(told[0], 1) != b"c":  # until the first one compiles
    pass
for _ in range(2):  # until another one waits for it, or compiles, too
    run()
    os.read(told[0], 1)
os.write(go_on[1], b"...")
for _ in range(3):
    os.wait()
"""


def test_of_processes_that_need_a_kernel_one_compiles_and_the_others_wait(tmp_path):
    """Numba alone has each of them compile it, as the ranks of a first run did."""
    (tmp_path / "waited_for.py").write_text(WAITED_FOR)
    found = python("import waited_for", PYTHONPATH=f"{tmp_path}:{SOURCE}", XDG_CACHE_HOME=str(tmp_path))
    assert sorted(found.stdout.splitlines()) == ["42 0 1", "42 1 0", "42 1 0"]


def test_constants_of_kernels_are_in_the_sources_that_name_their_cache():
    """A kernel would be taken from the cache with a constant's former value."""
    for path in Path(cpu_runtime.__file__).parent.glob("cpu_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("hotbed."):
                continue
            if any(name.name.isupper() for name in node.names):
                origin = sys.modules[str(node.module)].__file__
                assert Path(str(origin)) in cpu_runtime._SOURCES, f"{path.name} takes a constant of {node.module}"
