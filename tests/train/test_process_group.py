"""Tests of process groups, the watchdog and local ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import hotbed as hb
from hotbed import comm
from hotbed.cli.main import main
from hotbed.config import ParallelRecipe, TrainRecipe
from hotbed.errors import CommError, RecipeError, StoreError
from hotbed.optim import Moment
from hotbed.store import memory
from hotbed.train.ranks.process_group import (
    TorchrunWorld,
    Watchdog,
    first_failure,
    fresh_store,
    limit_of,
    process_group,
    read_world,
    run_local,
)
from hotbed.train.runs.plan_search import _refuse_too_many
from tests.train.launcher import PATIENCE_S
from tests.train.parallel_cases import RECIPE

# -- Protects: processes that torchrun started meet, also when started again, or errors say why they cannot.

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without what a launcher may have set."""
    for name in (*VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_is_alone_or_what_torchrun_says(environment: pytest.MonkeyPatch) -> None:
    assert read_world() == TorchrunWorld(rank=0, size=1, local_rank=0, local_size=1)
    for name, value in zip(VARIABLES, (5, 8, 1, 4), strict=False):
        environment.setenv(name, str(value))
    assert read_world() == TorchrunWorld(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "two"},
            "the environment variable WORLD_SIZE is 'two', expected a number",
        ),
        (
            {"WORLD_SIZE": "2"},
            "the environment variable WORLD_SIZE is 2, but RANK is not set",
        ),
        (
            {"RANK": "3"},
            "the environment variable RANK is 3, expected less than WORLD_SIZE 1",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": ""},
            "the environment variable LOCAL_RANK is '', expected a number",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_refused(
    environment: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(CommError) as caught, process_group(ParallelRecipe()):
        pass
    assert str(caught.value).startswith(message)


def test_others_that_cannot_be_met_are_said_to_be_so(environment: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    for name, value in zip(VARIABLES, ("1", "2", "1", "2", "127.0.0.1", "9"), strict=True):
        environment.setenv(name, value)
    try:
        with (
            pytest.raises(CommError, match=r"^rank 1 of 2 could not reach .* at 127\.0\.0\.1:9 within 1 s \("),
            process_group(ParallelRecipe(timeout_s=1), "cpu"),
        ):
            pass
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("device", "gpus", "backend"), [("cpu", 2, "gloo"), ("auto", 2, "cpu:gloo,cuda:nccl"), ("auto", 0, "gloo")]
)
def test_what_is_on_the_host_can_be_exchanged_wherever_is_computed(
    environment: pytest.MonkeyPatch, device: str, gpus: int, backend: str
) -> None:
    for name, value in zip(VARIABLES, ("1", "2", "1", "2"), strict=False):
        environment.setenv(name, value)
    began: list[str] = []
    environment.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    environment.setattr(torch.cuda, "device_count", lambda: gpus)
    environment.setattr(torch.cuda, "set_device", lambda _: None)
    environment.setattr(torch, "set_num_threads", lambda _: None)
    environment.setattr(dist, "init_process_group", lambda backend, timeout: began.append(backend))
    environment.setattr(dist, "destroy_process_group", lambda: None)
    with process_group(ParallelRecipe(), device):
        pass
    assert began == [backend]


def test_more_processes_than_gpus_are_refused(environment: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("1", "2", "1", "2"), strict=False):
        environment.setenv(name, value)
    environment.setattr(torch.cuda, "is_available", lambda: True)
    environment.setattr(torch.cuda, "device_count", lambda: 1)
    environment.setattr(torch, "set_num_threads", lambda _: None)
    with pytest.raises(CommError) as caught, process_group(ParallelRecipe()):
        pass
    assert str(caught.value).startswith("rank 1 of 2 is process 1 of this host, which has only 1 GPUs.")


def test_the_command_line_says_so_too(
    environment: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "{name: n, data: {path: nowhere}, model: {class_path: hotbed.nn.DLRM}, train: {batch_size: 8}, "
        "dense_optimizer: {class_path: torch.optim.SGD}, sparse_optimizer: {class_path: hotbed.optim.SGD}}",
        encoding="utf-8",
    )
    environment.setenv("WORLD_SIZE", "many")
    assert main(["train", str(recipe)]) == 2
    assert "hotbed: error: the environment variable WORLD_SIZE is 'many'" in capsys.readouterr().err


def test_ranks_that_are_started_again_meet_each_other_and_not_the_dead() -> None:
    shared, short = HashStore(), timedelta(seconds=0.2)
    for size in (3, 2, 4):
        with pytest.raises(RuntimeError, match="not all ranks started in time"):
            fresh_store(shared, 1, size, short)  # the first ranks that come in an attempt may be alone
        with pytest.raises(RuntimeError, match="not all ranks started in time"):
            fresh_store(shared, 0, size, short)
        with ThreadPoolExecutor(size) as threads:
            later = [threads.submit(fresh_store, shared, rank, size, timedelta(seconds=60)) for rank in range(1, size)]
            time.sleep(0.1)  # they answer the attempt before
            first = fresh_store(shared, 0, size, timedelta(seconds=60))
            stores = [first, *(store.result() for store in later)]
        for rank, store in enumerate(stores):
            assert not store.check([f"address {rank}"])  # nothing of an earlier attempt
            store.set(f"address {rank}", f"{size}")
        assert all(store.get(f"address {rank}") == f"{size}".encode() for store in stores for rank in range(size))


def test_the_rows_of_all_processes_of_a_host_have_to_fit(environment: pytest.MonkeyPatch) -> None:
    tables = [hb.Table("t", rows=1 << 20, dim=64), hb.Table("u", rows=1000, dim=16)]
    environment.setattr(memory, "available_bytes", lambda _: 200 << 20)
    here = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in here.items():
        environment.setenv(name, value)
    cpu, none = torch.device("cpu"), dict.fromkeys(("t", "u"), ())
    _refuse_too_many(hb.make_plan(tables, 4, "row"), tables, none, cpu)  # half of them are here
    _refuse_too_many(hb.make_plan(tables, 4, hb.Cut(rows=0, tier="disk")), tables, none, cpu)
    environment.setenv("RANK", "1")
    environment.setenv("LOCAL_WORLD_SIZE", "4")
    for copies in ("row", "dp"):
        with pytest.raises(StoreError, match=r"cpu memory: got [\d,]+ bytes.* 209,715,200 free bytes"):
            _refuse_too_many(hb.make_plan(tables, 4, copies), tables, none, cpu)
    environment.setenv("LOCAL_WORLD_SIZE", "2")
    one_moment = {"t": (Moment("m", "element"),), "u": ()}  # moments take room, too
    with pytest.raises(StoreError, match=r"Bytes by tier: device 268,467,456, host 0, disk 0$"):
        _refuse_too_many(hb.make_plan(tables, 4, "row"), tables, one_moment, cpu)


LEAVES = """
import sys
from pathlib import Path
from hotbed.measure.step_overheads import StepJob, build_request, run_request

run_request(build_request([StepJob(plan="row", warmup=1)] * 3, 1, 1))
threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print("groups' threads:", threads.count("gloo_tcp_loop"))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the names of threads are read from /proc")
def test_threads_of_models_groups_end_with_the_world_lest_they_abort_an_ending_process(tmp_path: Path) -> None:
    run_local([sys.executable, "-c", LEAVES], 2, tmp_path)
    for rank in range(2):
        said = (tmp_path / f"rank{rank}.log").read_text(encoding="utf-8")
        left = int(said.rpartition("groups' threads: ")[2])
        assert left <= 1  # of the seven groups of the world and three models; torch holds one of DDP's


# -- A process that hangs, or whose parent is gone, ends itself and says why.

SCRIPT = """
import os, sys, threading, time
from pathlib import Path
from hotbed.train.ranks.process_group import Watchdog, end_with_parent

def watched(progress, exempt, where=sys.argv[1]):
    here = lambda: "rank 1 of 3, step 7"
    return Watchdog(progress, 0.5, Path(where), rank=1, here=here, is_exempt=exempt)

def hangs():
    with watched(lambda: 5, lambda: False):
        threading.Event().wait()

def hangs_where_nothing_can_be_written():
    with watched(lambda: 5, lambda: False, "/nowhere"):
        threading.Event().wait()

def holds_the_lock():
    with watched(lambda: 5, lambda: False):
        sum(iter(int, 1))

def advances():
    start = time.monotonic()
    with watched(lambda: int(20 * (time.monotonic() - start)), lambda: False):
        time.sleep(1.2)
    time.sleep(0.8)

def saves():
    with watched(lambda: 5, lambda: True):
        time.sleep(1.2)

def loses_its_parent():
    if os.fork() == 0:
        end_with_parent("its parent", every_s=0.05)
        time.sleep(60)
    else:
        time.sleep(0.5)

for case in (hangs, hangs_where_nothing_can_be_written, holds_the_lock, advances, saves, loses_its_parent):
    print(f"== {case.__name__}", file=sys.stderr, flush=True)
    if (pid := os.fork()) == 0:
        case()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_it_ends_what_hangs_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["2", "2", "1", "0", "0", "0"], done.stderr
    hangs, unwritable, locked, advances, saves, orphan = re.split(r"== \w+\n", done.stderr)[1:]
    file = tmp_path / "stacks-1.txt"
    assert re.fullmatch(
        r"hotbed: error: rank 1 of 3, step 7: no batch was finished within 0.5 s, so this process ends. It is "
        rf"in wait \(.*\); stacks of its threads are in {file}. Raise train.step_limit_s if the step was only slow\n",
        hangs,
    )
    assert "in hangs" in file.read_text()
    assert "in hangs_where_nothing_can_be_written" in unwritable
    assert "are above (/nowhere/stacks-1.txt cannot be written: No such file or directory)" in unwritable
    assert "Timeout" in locked and "in holds_the_lock" in locked
    assert advances == saves == ""
    assert re.fullmatch(
        r"hotbed: error: rank \?: this process ends, because its parent \(PID \d+\) has ended\n", orphan
    )


def test_who_waits_for_another_rank_does_not_hang(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Waits:
        def wait(self) -> None:
            seen.append(comm.waits())

    work: list[tuple[int | None, object]] = [(1, Waits())]
    comm.Handle(lambda: None, work).wait()  # pyright: ignore[reportArgumentType]
    assert (seen, comm.waits()) == ([True], False)


def test_without_a_limit_there_is_no_thread(tmp_path: Path) -> None:
    watchdog = Watchdog(lambda: 0, None, tmp_path, rank=0, here=str, is_exempt=bool)
    with watchdog:
        assert watchdog._thread is None


def test_the_limit_is_the_recipes_or_that_of_exchanges() -> None:
    assert limit_of(RECIPE, 1) is None
    assert limit_of(replace(RECIPE, parallel=ParallelRecipe(timeout_s=30)), 2) == 30
    assert limit_of(replace(RECIPE, train=TrainRecipe(batch_size=8, step_limit_s=5)), 1) == 5
    with pytest.raises(RecipeError, match=r"train\.step_limit_s: got 0, expected at least 1"):
        TrainRecipe(batch_size=8, step_limit_s=0)


# -- Processes of a world on this machine: the one that fails is told, and nothing is left running.


def test_the_process_that_fails_is_named_and_not_one_that_waits_for_it() -> None:
    codes = ["import time; time.sleep(60)", "raise SystemExit(3)"]
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    try:
        assert first_failure(processes) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_every_rank_finds_its_place(tmp_path: Path) -> None:
    code = "import os; print(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"
    run_local([sys.executable, "-c", code], 2, tmp_path)
    assert (tmp_path / "rank1.log").read_text().split() == ["1", "1", "2", "127.0.0.1"]


def test_what_a_process_wrote_is_shown(tmp_path: Path) -> None:
    code = "import os, time; os.environ['RANK'] == '1' and exit('no such device'); time.sleep(600)"
    with pytest.raises(CommError, match="process 1 of 2 exited with 1: no such device"):
        run_local([sys.executable, "-c", code], 2, tmp_path)
