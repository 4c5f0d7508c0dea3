"""``hotbed train`` in several processes of its own: torchrun, plans from files, and ranks that die."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hotbed
from hotbed.batch import Batch
from hotbed.checkpoint import checkpoints_in, verify_checkpoint
from hotbed.nn import DLRM
from hotbed.plan import Plan

ROOT = Path(hotbed.__file__).parents[2]
PATIENCE_S = 300
"""A process that takes longer hangs; the machine may be busy."""
ENDLESS = ["--train.steps", "100000", "--train.epochs", "100000", "--train.log_every", "1"]

# Processes with the environment that torchrun gives them, forked by one that has imported everything: that takes
# seconds, and so none starts so much later than the others that these give up waiting.
LAUNCHER = f"""
import json, os, signal, sys
import torch._dynamo, hotbed.commands.main, hotbed.ops.cpu, hotbed.train.run, {__name__}
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if not os.fork():
        break
else:
    sys.exit()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background of a shell
os.setsid()
folder, size, port, args = json.loads(line)

def note(name, text):
    with open(f"{{folder}}/{{name}}", "w") as file:
        file.write(str(text))

note("leader.pid", os.getpid())
ranks = {{}}
for rank in range(size):
    if pid := os.fork():
        ranks[pid] = rank
        note(f"{{rank}}.pid", pid)
        continue
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(f"{{folder}}/{{rank}}.{{name}}", os.O_CREAT | os.O_WRONLY, 0o600), stream.fileno())
    os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}}
    os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}}
    sys.exit(hotbed.commands.main.main(args))
while ranks:
    pid, status = os.wait()
    note(f"{{ranks.pop(pid)}}.code", os.waitstatus_to_exitcode(status))
"""


class Processes:
    """Ranks of one ``hotbed`` command; their output is in files."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def text(self, rank: int | str, name: str) -> str:
        file = self.folder / f"{rank}.{name}"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def error(self, rank: int) -> str:
        """Last line on stderr."""
        return (self.text(rank, "err").strip().splitlines() or [""])[-1]

    def wait_for(self, rank: int | str, name: str, text: str = "") -> None:
        """Wait until a file of a rank has content, or contains a text."""
        end = time.monotonic() + PATIENCE_S
        while not (found := self.text(rank, name)) or text not in found:
            assert time.monotonic() < end, "\n".join(self.text(r, "err")[-1000:] for r in range(self.size))
            assert name == "code" or not self.text(rank, "code"), self.text(rank, "err")[-2000:]
            time.sleep(0.02)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, self.text(0, "err")[-2000:]
            time.sleep(0.02)

    def wait(self, *ranks: int) -> list[int]:
        """Wait until ranks (all by default) have ended; their exit codes."""
        ranks = ranks or tuple(range(self.size))
        for rank in ranks:
            self.wait_for(rank, "code")
        return [int(self.text(rank, "code")) for rank in ranks]

    def send(self, rank: int, how: signal.Signals) -> None:
        os.kill(int(self.text(rank, "pid")), how)

    def end(self) -> None:
        """Kill what is left of them."""
        self.wait_for("leader", "pid")
        with suppress(ProcessLookupError):
            os.killpg(int(self.text("leader", "pid")), signal.SIGKILL)


def unused_port() -> int:
    """A TCP port of the loopback interface, below those that the system gives to connections of other programs."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


class Launcher:
    """Starts ranks."""

    def __init__(self) -> None:
        env = os.environ | {"COLUMNS": "200", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", LAUNCHER]
        self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, text=True)

    @contextmanager
    def start(self, folder: Path, size: int, *args: str) -> Iterator[Processes]:
        """Ranks of ``hotbed train ARGS``; what is left of them afterwards is killed."""
        folder.mkdir()
        port = unused_port()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), size, port, ["train", *args]]) + "\n")
        self._process.stdin.flush()
        started = Processes(folder, size)
        try:
            yield started
        finally:
            started.end()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


def the_run(folder: Path) -> Path:
    """The one run's directory."""
    (run,) = (folder / "runs" / "small").iterdir()
    return run


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# -- torchrun ---------------------------------------------------------------------------------------------------------


def torchrun(folder: Path, *args: str) -> subprocess.Popen[str]:
    """``torchrun`` of ``hotbed train`` in two processes; ``ARGS`` of torchrun end with the recipe."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    at = next(i for i, arg in enumerate(args) if arg.endswith(".yaml"))
    return subprocess.Popen(
        [*command, *args[:at], "-m", "hotbed", "train", *args[at:], "--out", "runs", "--json", "summary.json"],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def output_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it says until it ends."""
    try:
        return process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()


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


class DiesOnce(DLRM):
    """Ends the process of a rank in the eighth batch of torchrun's first attempt."""

    deaths = ((0, 0),)
    """Attempt and rank of each."""

    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            self.batches = getattr(self, "batches", 0) + 1
            attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), torch.distributed.get_rank()
            if self.batches == 8 and (attempt, rank) in self.deaths:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


class DiesTwice(DiesOnce):
    """Another rank's process ends in the second attempt."""

    deaths = ((0, 0), (1, 1))


def restarted(recipe: Path, folder: Path, model: type[DiesOnce]) -> list[str]:
    """Have torchrun start a run again as often as it dies; its options."""
    options = ["--resume", "auto", "--train.checkpoint_every", "3", "--train.log_every", "1"]
    options += ["--model.class_path", f"{__name__}.{model.__name__}", "--parallel.timeout_s", str(PATIENCE_S)]
    done = torchrun(folder, "--max-restarts", str(len(model.deaths)), str(recipe), *options)
    _, stderr = output_of(done)
    assert done.returncode == 0, stderr
    run = the_run(folder)
    assert stderr.count("there is no checkpoint to go on from") == 1
    assert stderr.count("resumed from ") == len(model.deaths)
    lines = lines_of(run)
    steps = [0, *(line["step"] for line in lines if line["event"] == "resume")]
    assert len(steps) == len(model.deaths) + 1 and steps[1] in (3, 6)  # checkpoints are written in the background
    assert all(first < second <= first + 6 for first, second in pairwise(steps))
    assert json.loads((run / "summary.json").read_text())["steps"] == 19
    losses: dict[int, set[float]] = {}
    for line in lines:
        if line["event"] == "train":
            losses.setdefault(line["step"], set()).add(line["loss"])
    assert sorted(losses) == [*range(1, 20)]
    assert all(len(of_step) == 1 for of_step in losses.values())  # what was trained twice is the same, to the bit
    return options


def test_torchrun_starts_a_run_again_that_goes_on_from_its_newest_checkpoint(recipe: Path, tmp_path: Path) -> None:
    restarted(recipe, tmp_path, DiesOnce)


@pytest.mark.full
def test_torchrun_starts_a_run_again_twice_and_a_finished_one_trains_nothing(recipe: Path, tmp_path: Path) -> None:
    options = restarted(recipe, tmp_path, DiesTwice)
    run = the_run(tmp_path)
    lines = lines_of(run)
    again = torchrun(tmp_path, str(recipe), *options)
    stdout, stderr = output_of(again)
    assert again.returncode == 0, stderr
    assert stderr.count("is finished: 19 steps are trained and tested") == 1
    assert stdout.count("small: test, 300 samples") == 1
    assert len(lines_of(run)) == len(lines)


@pytest.mark.full
def test_torchrun_hands_ctrl_c_on_and_every_rank_saves(recipe: Path, tmp_path: Path) -> None:
    started = torchrun(tmp_path, str(recipe), "--resume", "auto", *ENDLESS)
    try:
        end = time.monotonic() + PATIENCE_S
        while not list(tmp_path.glob("runs/small/*/metrics.jsonl")):
            assert started.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
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
def test_replicas_that_do_not_divide_the_processes(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--parallel.replicas", "2", "--out", str(tmp_path / "runs")]
    with launcher.start(tmp_path / "ranks", 3, str(recipe), *options) as started:
        assert started.wait() == [2, 2, 2]
    assert started.error(0).endswith(
        "replicas is 2, must divide the 3 ranks; choose one of 1, 3, or start other processes"
    )


def test_a_plan_that_there_is_not(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    with launcher.start(
        tmp_path / "ranks", 2, str(recipe), "--plan", "tabel", "--out", str(tmp_path / "runs")
    ) as started:
        assert started.wait() == [2, 2]
    for rank in range(2):
        assert started.error(rank) == (
            f"hotbed: error: rank {rank}: there is no plan tabel; give a JSON file, or a scheme: table, row, column, "
            f"grid, dp"
        )
        assert "Traceback" not in started.text(rank, "err")
        assert started.text(rank, "out") == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_what_the_first_rank_cannot_find_ends_all(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--resume", str(tmp_path / "nowhere"), "--out", str(tmp_path / "runs")]
    with launcher.start(tmp_path / "ranks", 2, str(recipe), *options) as started:
        assert started.wait() == [2, 2]
    assert "nowhere is neither a checkpoint (manifest.json), nor a run's directory" in started.error(0)
    expected = "hotbed: error: rank 0 cannot find the checkpoint to go on from; its own output says why"
    assert started.error(1) == expected
    assert not (tmp_path / "runs").exists()


# -- ranks that die ---------------------------------------------------------------------------------------------------

EXCHANGE = re.compile(
    r"the exchange of [\w' ]+ failed; rank (\d) has ended or not answered in time, its own output says"
)
AVERAGE = re.compile(
    r"(?:one of ranks|rank) (\d(?:, \d)*) ended or does not answer, so gradients cannot be averaged; its "
)


def assert_it_is_said_who_died(started: Processes, dead: int, first_step: int) -> None:
    """Who notices may itself be what the third one misses, so a chain of messages leads to the rank that died."""
    blamed: dict[int, list[int]] = {}
    for rank in {0, 1, 2} - {dead}:
        error = started.error(rank)
        found = re.match(rf"hotbed: error: rank {rank} of 3, step (\d+): ", error)
        assert found, started.text(rank, "err")[-3000:]
        assert int(found[1]) >= first_step
        what = EXCHANGE.match(error, found.end()) or AVERAGE.match(error, found.end())
        assert what, error
        assert "Traceback" not in started.text(rank, "err")
        blamed[rank] = [int(r) for r in what[1].split(", ")]
    assert any(dead in others for others in blamed.values()), blamed
    for others in blamed.values():
        assert any(r == dead or dead in blamed[r] for r in others), blamed


def test_when_a_rank_is_killed_the_others_end_and_the_run_can_be_gone_on_with(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    # The others must not wait for the timeout: this test would not.
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--parallel.timeout_s", str(10 * PATIENCE_S)]
    first = ["--plan", "row", "--train.checkpoint_every", "10", "--train.keep_last", "1000"]
    with launcher.start(tmp_path / "killed", 3, *options, *ENDLESS, *first) as started:
        started.wait_for(0, "err", "step 10/")
        run = the_run(tmp_path)
        started.wait_until(lambda: bool(checkpoints_in(run / "checkpoints")))  # they are written in the background
        checkpoint = checkpoints_in(run / "checkpoints")[0]
        step = int(checkpoint.name.removeprefix("last-"))
        started.wait_for(0, "err", f"step {step + 2}/")
        started.send(1, signal.SIGKILL)
        assert started.wait() == [2, -signal.SIGKILL, 2]
    assert_it_is_said_who_died(started, 1, step + 2)
    assert started.text(0, "out") == ""
    assert not (run / "summary.json").exists()
    verify_checkpoint(checkpoint)
    rest = ["--plan", str(run / "plan.json"), "--resume", str(checkpoint), "--train.steps", str(step + 3)]
    rest += ["--train.epochs", "100000", "--name", "again", "--train.log_every", "1"]
    with launcher.start(tmp_path / "again", 3, *options, *rest) as started:
        assert started.wait() == [0, 0, 0], started.text(0, "err")
    (again,) = (tmp_path / "runs" / "again").iterdir()
    summary = json.loads((again / "summary.json").read_text())
    assert (summary["steps"], summary["samples"], summary["ranks"]) == (step + 3, (step + 3) * 128, 3)
    assert (again / "plan.json").read_text() == (run / "plan.json").read_text()
    # The last steps before the death are done again, to the bit.
    before = {line["step"]: line["loss"] for line in lines_of(run) if line["event"] == "train"}
    after = {line["step"]: line["loss"] for line in lines_of(again) if line["event"] == "train"}
    assert sorted(after) == [step + 1, step + 2, step + 3]
    both = before.keys() & after.keys()
    assert both >= {step + 1, step + 2}
    assert [after[s] for s in both] == [before[s] for s in both]
    assert started.text(0, "out").count("run: ") == 1
    assert started.text(1, "out") == started.text(2, "out") == ""


def test_any_rank_may_be_asked_for_a_checkpoint_and_to_stop(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--plan", "row", "--train.keep_last", "9"]
    with launcher.start(tmp_path / "stopped", 3, *options, *ENDLESS) as started:
        started.wait_for(0, "err", "step 5/")
        started.send(2, signal.SIGUSR1)
        saved = the_run(tmp_path) / "checkpoints"
        started.wait_until(lambda: len(checkpoints_in(saved)) == 1)
        started.send(1, signal.SIGTERM)
        assert started.wait() == [143, 143, 143]
    asked, last = checkpoints_in(saved)
    step = verify_checkpoint(last).step
    assert 5 < verify_checkpoint(asked).step < step
    message = f"hotbed: stopped by a signal after step {step:,}; go on with --resume {last}"
    assert message in started.text(0, "err")
    assert "stopped" not in started.text(1, "err") + started.text(2, "err")
    assert not (the_run(tmp_path) / "summary.json").exists()
    records = [line for line in lines_of(the_run(tmp_path)) if line["event"] == "checkpoint"]
    assert [record["path"] for record in records] == [asked.path, last.path]
    rest = ["--resume", str(saved), "--train.steps", str(step + 3), "--train.epochs", "100000", "--name", "again"]
    with launcher.start(tmp_path / "again", 3, *options, *rest) as started:
        assert started.wait() == [0, 0, 0], started.text(0, "err")
    (again,) = (tmp_path / "runs" / "again").iterdir()
    assert json.loads((again / "summary.json").read_text())["steps"] == step + 3


class Compiles(DLRM):
    """Takes for ever in its first batch, in code that Python cannot interrupt."""

    def forward(self, batch: Batch) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 31)
        return super().forward(batch)


def test_ctrl_c_ends_all_ranks_with_a_checkpoint_and_a_second_one_at_once(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--plan", "row"]
    with launcher.start(tmp_path / "once", 2, *options, *ENDLESS) as started:
        started.wait_for(0, "err", "step 5/")
        for rank in (0, 1):
            started.send(rank, signal.SIGINT)
        assert started.wait() == [130, 130]
    (checkpoint,) = checkpoints_in(the_run(tmp_path) / "checkpoints")
    message = f"stopped by a signal after step {verify_checkpoint(checkpoint).step:,}; go on with --resume {checkpoint}"
    assert message in started.text(0, "err")
    model = ["--model.class_path", f"{__name__}.Compiles", "--name", "twice"]
    with launcher.start(tmp_path / "twice", 2, *options, *model) as started:
        started.wait_for(0, "err", "Ctrl-C again ends it at once")
        time.sleep(0.5)  # the other rank's first one must be over
        for rank in (0, 1):
            started.send(rank, signal.SIGINT)
        assert started.wait() == [-signal.SIGINT, -signal.SIGINT]


@pytest.mark.full
def test_damage_that_one_rank_finds_is_avoided_by_all(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--plan", "row", "--resume", "auto"]
    options += ["--train.checkpoint_every", "4", "--train.keep_last", "9"]
    with launcher.start(tmp_path / "first", 2, *options, "--train.steps", "9") as started:
        assert started.wait() == [0, 0], started.text(0, "err")[-2000:]
    kept = the_run(tmp_path) / "checkpoints"
    (file,) = (kept / "last-00000009").glob("tables-00001-*")  # of rank 1's rows
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with launcher.start(tmp_path / "second", 2, *options) as started:
        assert started.wait() == [0, 0], started.text(0, "err")[-2000:]
    assert "last-00000009 is renamed to damaged-last-00000009-" in started.text(0, "err")
    assert "last-00000008 at step 8" in started.text(0, "err")
    assert [c.name for c in checkpoints_in(kept)] == [f"last-{step:08d}" for step in (4, 8, 12, 16, 19)]
    for checkpoint in checkpoints_in(kept):
        verify_checkpoint(checkpoint)


@pytest.mark.full
def test_when_a_rank_hangs_the_others_end_after_the_timeout(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "runs"), "--train.checkpoint", "none", "--parallel.timeout_s", "30"]
    with launcher.start(tmp_path / "stopped", 3, str(recipe), *options, *ENDLESS) as started:
        started.wait_for(0, "err", "step 5/")
        started.send(2, signal.SIGSTOP)
        assert started.wait(0, 1) == [2, 2]
        assert started.text(2, "code") == ""
    assert_it_is_said_who_died(started, 2, 5)


class DiesInBackward(DLRM):
    """Ends the process of rank 1 in the backward of its fourth batch, when all gradients but one are there."""

    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            self.batches = getattr(self, "batches", 0) + 1
            if self.batches == 4 and torch.distributed.get_rank() == 1:
                self.bottom[0].weight.register_hook(lambda _: os._exit(3))
        return super().forward(batch)


def test_when_a_rank_dies_before_dense_gradients_are_averaged_the_others_say_so(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    options = ["--out", str(tmp_path / "runs"), "--train.checkpoint", "none", "--parallel.timeout_s", str(PATIENCE_S)]
    options += ["--model.class_path", f"{__name__}.DiesInBackward"]
    with launcher.start(tmp_path / "dead", 3, str(recipe), *options, *ENDLESS) as started:
        assert started.wait() == [2, 3, 2], started.error(0) + started.error(2)
    assert_it_is_said_who_died(started, 1, 4)
    for rank in (0, 2):
        assert ", step 4: " in started.error(rank)
        assert "gradients" in started.error(rank)
