"""Tests of process groups, the watchdog, local ranks, and of runs that torchrun starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import hotbed as hb
from hotbed import comm
from hotbed.checkpoint import checkpoints_in, verify_checkpoint
from hotbed.config import ParallelRecipe, TrainRecipe
from hotbed.errors import CommError, RecipeError, StoreError
from hotbed.optim import Moment
from hotbed.plan import Plan
from hotbed.store import memory
from hotbed.train.ranks.process_group import (
    TorchrunWorld,
    fresh_store,
    limit_of,
    process_group,
    read_world,
    run_local,
)
from hotbed.train.runs.plan_search import _refuse_too_many
from tests.cli.cases import train
from tests.train.launcher import (
    ENDLESS,
    PATIENCE_S,
    ROOT,
    Launcher,
    lines_of,
    output_of,
    the_run,
    torchrun,
    unused_port,
    wait_until,
)
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
    assert "rank 1 of 2" in str(caught.value) and "1 GPUs" in str(caught.value)


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
from hotbed.train.ranks.process_group import end_with_parent, watchdog

def watched(progress, exempt, where=sys.argv[1]):
    here = lambda: "rank 1 of 3, step 7"
    return watchdog(progress, 0.5, Path(where), rank=1, here=here, is_exempt=exempt)

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


def test_the_limit_is_the_recipes_or_that_of_exchanges() -> None:
    assert limit_of(RECIPE, 1) is None
    assert limit_of(replace(RECIPE, parallel=ParallelRecipe(timeout_s=30)), 2) == 30
    assert limit_of(replace(RECIPE, train=TrainRecipe(batch_size=8, step_limit_s=5)), 1) == 5
    with pytest.raises(RecipeError, match=r"train\.step_limit_s: got 0, expected at least 1"):
        TrainRecipe(batch_size=8, step_limit_s=0)


# -- Processes of a world on this machine: the one that fails is told, and nothing is left running.


def test_every_rank_finds_its_place(tmp_path: Path) -> None:
    code = "import os; print(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"
    run_local([sys.executable, "-c", code], 2, tmp_path)
    assert (tmp_path / "rank1.log").read_text().split() == ["1", "1", "2", "127.0.0.1"]


def test_what_a_process_wrote_is_shown(tmp_path: Path) -> None:
    code = "import os, time; os.environ['RANK'] == '1' and exit('no such device'); time.sleep(600)"
    with pytest.raises(CommError, match="process 1 of 2 exited with 1: no such device"):
        run_local([sys.executable, "-c", code], 2, tmp_path)


# -- hotbed train under torchrun ---------------------------------------------------------------------------------------


def test_torchrun_trains_one_model_and_says_everything_once(recipe: Path, tmp_path: Path) -> None:
    options = ["--plan", "table", "--data.valid_split", "valid", "--train.log_every", "5", "--train.eval_every", "10"]
    done = torchrun(tmp_path, str(recipe), *options)
    stdout, stderr = output_of(done)
    assert done.returncode == 0, stderr
    run = the_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "plan.json",
        "recipe.yaml",
        "summary.json",
    ]
    assert (summary["ranks"], summary["steps"], summary["samples"], summary["epochs"]) == (2, 19, 2400, 1)
    assert 0 <= summary["ids_exchange_hidden_share"] <= 1
    assert summary["test"]["samples"] == 300
    assert 0.5 < summary["test"]["auc"] < 1
    assert [(line["event"], line["step"]) for line in lines_of(run)] == [
        ("train", 5),
        ("train", 10),
        ("eval", 10),
        ("train", 15),
        ("train", 19),
        ("checkpoint", 19),
    ]
    plan = Plan.from_json((run / "plan.json").read_text())
    assert plan.world_size == 2
    assert len(plan.by_table) == 26
    (checkpoint,) = checkpoints_in(run / "checkpoints")
    verify_checkpoint(checkpoint)
    assert stdout.count("small: test, 300 samples") == 1
    assert stdout.count("19 steps, 2,400 samples") == 1
    assert stdout.count("2 processes; ") == 1
    assert stdout.count("run: ") == 1
    assert len(re.findall(r"^step 10/19 ", stderr, flags=re.MULTILINE)) == 1
    assert stderr.count("valid AUC") == 1


@pytest.mark.full
def test_torchrun_starts_a_run_again_twice_and_a_finished_one_trains_nothing(recipe: Path, tmp_path: Path) -> None:
    options = ["--train.checkpoint_every", "3", "--train.log_every", "1", "--parallel.timeout_s", str(PATIENCE_S)]
    options += ["--model.class_path", "tests.train.rank_models.DiesTwice"]
    done = torchrun(tmp_path, "--max-restarts", "2", str(recipe), *options)
    _, stderr = output_of(done)
    assert done.returncode == 0, stderr
    run = the_run(tmp_path)
    assert stderr.count("under torchrun, the newest run of this recipe is resumed") == 3
    assert stderr.count("no checkpoint to resume") == 1
    assert stderr.count("resumed from ") == 2
    lines = lines_of(run)
    steps = [0, *(line["step"] for line in lines if line["event"] == "resume")]
    assert len(steps) == 3 and steps[1] in (3, 6)  # checkpoints are written in the background
    assert all(first < second <= first + 6 for first, second in pairwise(steps))
    assert json.loads((run / "summary.json").read_text())["steps"] == 19
    losses: dict[int, set[float]] = {}
    for line in lines:
        if line["event"] == "train":
            losses.setdefault(line["step"], set()).add(line["loss"])
    assert sorted(losses) == [*range(1, 20)]
    assert all(len(of_step) == 1 for of_step in losses.values())  # what was trained twice is the same, to the bit
    again = torchrun(tmp_path, str(recipe), *options)
    stdout, stderr = output_of(again)
    assert again.returncode == 0, stderr
    assert stderr.count("is finished after 19 steps") == 1
    assert stdout.count("small: test, 300 samples") == 1
    assert len(lines_of(run)) == len(lines)


@pytest.mark.full
def test_torchrun_hands_ctrl_c_on_and_every_rank_saves(recipe: Path, tmp_path: Path) -> None:
    started = torchrun(tmp_path, str(recipe), "--resume", "auto", *ENDLESS)
    try:
        wait_until(lambda: started.poll() is not None or any(tmp_path.glob("runs/small/*/metrics.jsonl")), str)
        assert started.poll() is None
    finally:
        started.send_signal(signal.SIGINT)
    _, stderr = output_of(started)
    assert started.returncode == 1  # torchrun's, whatever its processes end with
    assert "stopped by a signal after step " in stderr
    (checkpoint,) = checkpoints_in(the_run(tmp_path) / "checkpoints")
    verify_checkpoint(checkpoint)


@pytest.mark.full
def test_replicas_are_trained_averaged_and_reported(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--plan", "row", "--parallel.replicas", "2", "--parallel.sync_every", "4"]
    options += ["--memory.tier", "disk", "--memory.cache_rows", "500"]
    with launcher.start(tmp_path / "ranks", 4, str(recipe), *options, "--out", str(tmp_path / "runs")) as started:
        assert started.wait() == [0, 0, 0, 0], started.text(0, "err")[-2000:]
    run = the_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["ranks"], summary["replicas"], summary["syncs"]) == (4, 2, 5)
    assert summary["sync_bytes"] > 0 and summary["sync_s"] > 0 and summary["imbalance_lookups"] >= 1
    assert summary["memory"]["hits"] > 0
    assert Plan.from_json((run / "plan.json").read_text()).world_size == 2
    (checkpoint,) = checkpoints_in(run / "checkpoints")
    verify_checkpoint(checkpoint)


@pytest.mark.full
def test_what_the_first_rank_cannot_find_ends_all(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--resume", str(tmp_path / "nowhere"), "--out", str(tmp_path / "runs")]
    with launcher.start(tmp_path / "ranks", 2, str(recipe), *options) as started:
        assert started.wait() == [2, 2]
    assert "nowhere is not a checkpoint (it has no manifest.json), nor a run" in started.error(0)
    expected = "hotbed: error: rank 0 cannot find the checkpoint to resume"
    assert started.error(1).startswith(expected)
    assert not (tmp_path / "runs").exists()


# -- agents of torchrun that come and go -------------------------------------------------------------------------------

STEPS = 300
ELASTIC = ["--nnodes", "1:3", "--nproc_per_node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
QUICKLY = ["--max-restarts", "9", "--rdzv-conf", "last_call_timeout=2,join_timeout=200", "--monitor-interval", "0.2"]
OPTIONS = ["--plan", "row", "--train.steps", str(STEPS), "--train.epochs", "1000", "--train.checkpoint_every", "5"]
OPTIONS += ["--parallel.virtual_ranks", "4"]  # so that bits do not depend on the number of processes


class Agents:
    """Agents of one job, as hosts would run them; the first has the store by which they meet."""

    def __init__(self, folder: Path, recipe: Path) -> None:
        self._folder, self._recipe, self._port = folder, recipe, unused_port()
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self) -> subprocess.Popen[bytes]:
        """Start one more."""
        command = [sys.executable, "-m", "torch.distributed.run", *ELASTIC, *QUICKLY]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "-m", "hotbed", "train", str(self._recipe), *OPTIONS]
        command += ["--model.class_path", "tests.train.rank_models.Slow", "--out", str(self._folder / "runs")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "COLUMNS": "200"}
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self._folder / f"agent-{len(self.processes)}.err").open("wb") as file:
            process = subprocess.Popen(command, cwd=self._folder, env=env, stdout=subprocess.DEVNULL, stderr=file)
        self.processes.append(process)
        return process

    @property
    def said(self) -> str:
        """All that they and their processes wrote to stderr."""
        return "".join(f.read_text(encoding="utf-8") for f in sorted(self._folder.glob("agent-*.err")))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: self.said)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


@pytest.fixture
def agents(recipe: Path, tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path, recipe)
    yield made
    made.close()


def steps_of(folder: Path) -> list[tuple[str, int]]:
    with suppress(FileNotFoundError, ValueError, json.JSONDecodeError):
        return [(line["event"], line["step"]) for line in lines_of(the_run(folder)) if "step" in line]
    return []


def workers_of(agent: subprocess.Popen[Any]) -> list[int]:
    found = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    return [int(pid) for pid in found.read_text().split()]


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_agents_are_killed_and_added_and_the_run_goes_on(agents: Agents, recipe: Path, tmp_path: Path) -> None:
    def resumed(times: int) -> Callable[[], bool]:
        return lambda: sum(event == "resume" for event, _ in steps_of(tmp_path)) == times

    def checkpoints(after: int) -> Callable[[], bool]:
        return lambda: any(event == "checkpoint" and step > after for event, step in steps_of(tmp_path))

    for _ in range(3):
        agents.add()
    agents.wait_until(checkpoints(5))
    (worker,) = workers_of(agents.processes[2])
    agents.processes[2].kill()  # as its host dies; its process ends with it
    agents.wait_until(lambda: not Path(f"/proc/{worker}").exists())
    agents.wait_until(resumed(1))
    last = steps_of(tmp_path)[-1][1]
    agents.wait_until(checkpoints(last + 5))
    agents.add()
    agents.wait_until(resumed(2))
    (worker,) = workers_of(agents.processes[1])
    os.kill(worker, signal.SIGKILL)
    for process in (agents.processes[0], agents.processes[1], agents.processes[3]):
        assert process.wait(PATIENCE_S) == 0, agents.said[-5000:]
    assert "has ended" in agents.said
    assert agents.said.count("no checkpoint to resume; a new run starts") == 1
    summary = json.loads((the_run(tmp_path) / "summary.json").read_text())
    assert (summary["steps"], summary["ranks"]) == (STEPS, 3)
    _, whole, _ = train(recipe, *OPTIONS, "--name", "whole")
    assert summary["test"] == whole["test"]
