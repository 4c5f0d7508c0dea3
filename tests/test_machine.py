"""How OpenMP's threads wait and how many there are: in fresh processes, and under quotas of made-up control groups."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hotbed import machine
from hotbed.cli.main import main
from tests.matrix import full

WATCH = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "numba", "numpy"):
            print(name, *(f"{v}={os.environ.get(v)}" for v in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")))

sys.meta_path.insert(0, Watch())
"""
WAYS = {
    "import": "import hotbed; hotbed.Trainer",
    "command": "import sys; sys.argv = ['hotbed', 'prepare', '--help']; from hotbed.cli.main import main; main()",
    "module": "import sys, runpy; sys.argv = ['hotbed', 'prepare', '--help']; runpy.run_module('hotbed')",
    "rank": "import hotbed.cli.promise",
}
KERNEL = """
import torch
from hotbed.ops import cpu
torch.ones(1000, 1000).matmul(torch.ones(1000, 1000))
cpu.initial_values_(torch.empty(2, 2), seed=1, rows=range(2), cols=range(2), bound=1.0)
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In an environment that says nothing of OpenMP but this."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    return subprocess.run([sys.executable, "-c", code], env=kept | env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("way", [full(way) if way in ("module", "command") else way for way in WAYS])
def test_spinning_is_short_before_anything_that_computes_is_imported(way: str) -> None:
    found = python(WATCH + WAYS[way]).stdout.splitlines()
    said = {
        line.split()[0]: line.split()[1:] for line in found if line.split()[:1] in (["torch"], ["numba"], ["numpy"])
    }
    assert said.keys() >= {"torch", "numpy"}
    assert all(values == ["GOMP_SPINCOUNT=3000", "KMP_BLOCKTIME=1"] for values in said.values())


@pytest.mark.parametrize("name", [machine.OF_USERS[0], *map(full, machine.OF_USERS[1:])])
def test_what_the_user_has_set_stays_and_nothing_is_set_beside_it(name: str) -> None:
    code = f"import hotbed, os; print({{n: os.environ[n] for n in {machine.OF_USERS} if n in os.environ}})"
    assert python(code, **{name: "active"}).stdout == f"{{'{name}': 'active'}}\n"


@pytest.mark.parametrize(
    ("first", "env", "expected"),
    [
        ("import hotbed, torch", {}, "False"),
        ("import torch, hotbed", {}, "True"),
        full("import torch, hotbed", {"OMP_WAIT_POLICY": "passive"}, "False"),
    ],
)
def test_it_is_known_where_the_short_spin_came_too_late(first: str, env: dict[str, str], expected: str) -> None:
    assert python(f"{first}; print(hotbed.machine.TORCH_CAME_FIRST)", **env).stdout == f"{expected}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's runtime")
def test_both_runtimes_of_a_process_read_it() -> None:
    """libgomp says what it has read when it is loaded: torch's, and the system's, which Numba loads."""
    hotbed_first = python("import hotbed" + KERNEL, OMP_DISPLAY_ENV="verbose").stderr
    if "GOMP_SPINCOUNT" not in hotbed_first:
        pytest.skip("the OpenMP runtime is not GNU's")
    said = [line.split("=")[1].strip() for line in hotbed_first.splitlines() if "GOMP_SPINCOUNT" in line]
    assert said == ["'3000'", "'3000'"]


# -- how many ---------------------------------------------------------------------------------------------------------


def cores_under(root: Path, cgroup: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a process that may run on eight."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": t for name, t in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return machine.usable_cores(root)


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2, id="v2, in a container"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 2, id="v2, parent"),
        pytest.param("0::/a\n", {"a/cpu.max": "max 100000\n"}, 8, id="v2, none"),
        pytest.param("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1, id="v2, half a core"),
        pytest.param("0::/a\n", {"a/cpu.max": "6400000 100000\n"}, 8, id="v2, more than there are"),
        pytest.param("0::/a\n", {}, 8, id="v2, without the controller"),
        pytest.param(
            "5:memory:/m\n4:cpu,cpuacct:/docker/x\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            3,
            id="v1, in a container, the path of the host",
        ),
        pytest.param(
            "1:cpu:/a/b\n",
            {"cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}
            | {"cpu/a/cpu.cfs_quota_us": "410000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            5,
            id="v1, parent",
        ),
        pytest.param(
            "1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 8, id="v1, none"
        ),
    ],
)
def test_cores_are_at_most_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], cores: int
) -> None:
    assert cores_under(tmp_path, cgroup, files, monkeypatch) == cores


def test_without_control_groups_all_cores_are_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert machine.usable_cores(tmp_path) == 3


@pytest.fixture
def six_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("processes", "env", "expected"),
    [
        (1, {}, 6),
        (4, {}, 1),
        (2, {}, 3),
        (9, {}, 1),
        (1, {"OMP_NUM_THREADS": "7"}, 8),  # which torch has read when it was imported
        (2, {"OMP_NUM_THREADS": "1"}, 8),
        (2, {"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "x"}, 8),
        (2, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 3),  # torchrun's own
    ],
)
def test_threads_are_the_cores_of_a_process_unless_the_user_has_set_them(
    six_cores: pytest.MonkeyPatch, processes: int, env: dict[str, str], expected: int
) -> None:
    for name, value in env.items():
        six_cores.setenv(name, value)
    machine.fit_threads(processes)
    assert torch.get_num_threads() == expected


def test_fewer_threads_than_cores_stay_so(six_cores: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    machine.fit_threads()
    assert torch.get_num_threads() == 2


def test_the_command_fits_its_threads(six_cores: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert torch.get_num_threads() == 6


def test_single_threads_compute_alone_from_their_first_operation_on() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with machine.single_threads(2, "alone") as pool:
            values = torch.ones(1 << 20)
            assert all(
                pool.submit(lambda: (values.exp().sum(), torch.get_num_threads())[1]).result() == 1 for _ in range(8)
            )
            assert pool.submit(lambda: threading.current_thread().name.rsplit("_", 1)[0]).result() == "alone"
        seen: list[object] = []
        thread = machine.start_alone(lambda: seen.extend([torch.get_num_threads(), values.exp().sum()]), "apart")
        thread.join()
        assert seen[0] == 1 and len(seen) == 2 and thread.daemon and thread.name == "apart"
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)
