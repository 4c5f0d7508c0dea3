"""Kill commands at drawn points, let them go on, and compare what they end with."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from hotbed.checkpoint import Directory, checkpoints_in, directory, verify_checkpoint
from hotbed.errors import HotbedError
from tests.crashes.points import Point
from tests.crashes.wants import Want
from tests.crashes.zygote import COUNTS, DEATH, DIGESTS
from tests.train.launcher import ROOT, unused_port

LIMIT_S = 240
"""A process that takes longer hangs."""
NEVER_THE_SAME = {"samples_per_s", "seconds", "time", "waited_s", "stalled_s"}


@dataclass(frozen=True)
class Workload:
    """A command that phases are reached in.

    Attributes
    ----------
    name
        Of it.
    phases
        In which processes die.
    args
        Of the command; ``FOLDER`` stands for where it runs.
    ranks
        Processes.
    begun
        Arguments of a command that is run first, and to its end; the one that dies goes on from there.
    """

    name: str
    phases: tuple[str, ...]
    args: tuple[str, ...]
    ranks: int = 1
    begun: tuple[str, ...] | None = None


TRAIN = ("train", "DATA/recipe.yaml", "--out", "FOLDER/runs", "--resume", "auto")
TIERS = ("--memory.tier", "disk", "--memory.cache_rows", "64", "--memory.directory", "FOLDER/rows")
CHAIN = ("--train.checkpoint_full_every", "4", "--train.keep_last", "2")
WORKLOADS = (
    Workload("one process", ("training", "saving"), TRAIN),
    Workload("chain", ("delta",), (*TRAIN, *CHAIN)),
    Workload("go on", ("loading",), (*TRAIN, *CHAIN), begun=(*TRAIN, *CHAIN, "--train.steps", "9")),
    Workload("tiers", ("write-back", "evictions"), (*TRAIN, *TIERS)),
    Workload("dynamic", ("evictions",), (*TRAIN, "--model.class_path", "tests.crashes.models.DynamicDLRM")),
    Workload("prepare", ("preparing",), ("prepare", "DATA/log.tsv", "FOLDER/prepared", "--threshold", "2")),
    Workload("two ranks", ("exchange",), (*TRAIN, "--parallel.plan", "row", "--parallel.timeout_s", "60"), ranks=2),
    Workload(
        "two replicas",
        ("replicas",),
        (*TRAIN, "--parallel.replicas", "2", "--parallel.sync_every", "2", "--parallel.timeout_s", "60"),
        ranks=2,
    ),
)


@dataclass
class Outcome:
    """What has been tried, by phase and workload."""

    tried: Counter[str] = field(default_factory=Counter)
    died: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    finished_first: int = 0
    lost: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tried": dict(self.tried),
            "died": dict(self.died),
            "finished_first": self.finished_first,
            "operations": dict(sorted(self.operations.items())),
            "lost": self.lost,
        }


class Commands:
    """Runs commands in forks of a process that has imported everything."""

    def __init__(self, data: Path) -> None:
        self.data = data
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "OMP_NUM_THREADS": "1",
            "POLARS_MAX_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "COLUMNS": "300",
        }
        argv = [sys.executable, "-c", "from tests.crashes.zygote import serve; serve()"]
        self._process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def run(
        self, args: Sequence[str], folder: Path, ranks: int = 1, point: Point | None = None, want: Any = None
    ) -> dict[str, Any]:
        """Run a command; its exit codes by rank, and when each rank ended."""
        folder.mkdir(exist_ok=True)
        (folder / DEATH).unlink(missing_ok=True)
        replaced = [arg.replace("FOLDER", str(folder)).replace("DATA", str(self.data)) for arg in args]
        task = {
            "folder": str(folder),
            "args": replaced,
            "ranks": ranks,
            "port": unused_port() if ranks > 1 else 0,
            "point": None if point is None else point.to_dict(),
            "want": want,
            "limit_s": LIMIT_S,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def make_data(folder: Path) -> Path:
    """A small log, its dataset, and a recipe of a run of seconds."""
    from hotbed.data import write_synthetic_log
    from hotbed.data.prepare import prepare

    folder.mkdir(parents=True, exist_ok=True)
    write_synthetic_log(folder / "log.tsv", 1500, seed=1)
    prepare(folder / "log.tsv", folder / "prepared", threshold=2, valid_fraction=0.1, test_fraction=0.1)
    recipe = {
        "name": "crash",
        "data": {"path": str(folder / "prepared"), "dim": 8, "valid_split": "valid"},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {
            "batch_size": 128,
            "device": "cpu",
            "precision": "fp32",
            "epochs": 2,
            "eval_every": 7,
            "log_every": 1,
            "checkpoint": "last",
            "checkpoint_every": 2,
            "keep_last": 2,
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder


# -- what a command leaves -----------------------------------------------------------------------------------------


def published(folder: Path) -> list[Directory]:
    """Checkpoints of all runs in a folder."""
    return [
        checkpoint
        for place in sorted(folder.glob("runs/*/*/checkpoints"))
        for checkpoint in checkpoints_in(directory(place))
    ]


def unreadable(folder: Path) -> list[str]:
    """What is wrong with published checkpoints, every byte of which is read."""
    faults: list[str] = []
    for checkpoint in published(folder):
        try:
            verify_checkpoint(checkpoint)
        except HotbedError as error:
            faults.append(str(error))
    return faults


def result_of(workload: Workload, folder: Path) -> dict[str, Any]:
    """What a command that has ended leaves, for comparison to the bit."""
    if workload.args[0] == "prepare":
        out = folder / "prepared"
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        found = {
            str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(out.rglob("*"))
            if path.is_file()
        }
        return {**found, "left behind": len(hidden)}
    (run,) = (path.parent for path in folder.glob("runs/*/*/summary.json"))  # one that died early began another
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    digest = json.loads((folder / DIGESTS).read_text(encoding="utf-8").splitlines()[-1])
    losses: dict[str, Any] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["event"] in ("train", "eval"):
            same = {key: value for key, value in record.items() if key in ("loss", "auc", "logloss", "lr", "samples")}
            losses[f"{record['event']} {record['step']}"] = same
    kept = [checkpoint.name for checkpoint in published(folder)]
    test = {key: value for key, value in summary["test"].items() if key not in NEVER_THE_SAME}
    return {**digest, **losses, "test": test, "steps": summary["steps"], "kept": kept[-1:]}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is not the same."""
    return sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))


# -- a campaign ----------------------------------------------------------------------------------------------------


class Campaign:
    """Tries points of workloads, all drawn from one seed."""

    def __init__(self, commands: Commands, folder: Path, seed: int) -> None:
        self._commands, self._folder = commands, folder
        self._draw = random.Random(seed)
        self._profiles: dict[str, tuple[dict[str, list[int]], dict[str, Any]]] = {}
        self._number = 0
        self.outcome = Outcome()

    def profile(self, workload: Workload) -> tuple[dict[str, list[int]], dict[str, Any]]:
        """How many operations each phase of an undisturbed run has, by rank, and what it ends with."""
        if workload.name not in self._profiles:
            folder = self._begin(workload, "whole")
            ended = self._commands.run(workload.args, folder, workload.ranks)
            if any(ended["codes"]):
                raise AssertionError(f"{workload.name}: {ended}\n{said(folder, workload.ranks)}")
            counts = [json.loads((folder / f"{rank}.{COUNTS}").read_text()) for rank in range(workload.ranks)]
            by_phase = {phase: [of["phases"].get(phase, 0) for of in counts] for phase in workload.phases}
            self._profiles[workload.name] = by_phase, result_of(workload, folder)
        return self._profiles[workload.name]

    def try_point(self, workload: Workload, phase: str) -> bool:
        """Kill a command in this phase, and let it go on to its end; False if it finished before its point."""
        counts, expected = self.profile(workload)
        rank = self._draw.randrange(workload.ranks)
        if not counts[phase][rank]:
            raise AssertionError(f"{workload.name} has no operation of phase {phase}: {counts}")
        point = Point(phase, self._draw.randint(1, counts[phase][rank]), self._draw.random() < 0.5, rank)
        self._number += 1
        folder = self._begin(workload, f"{self._number:05d}")
        self.outcome.tried[phase] += 1
        ended = self._commands.run(workload.args, folder, workload.ranks, point)
        if ended["codes"][rank] != -9:
            if any(ended["codes"]):
                self._lose(workload, point, "failed without being killed", said(folder, workload.ranks))
            self.outcome.finished_first += 1
            shutil.rmtree(folder)
            return False
        death = json.loads((folder / DEATH).read_text())
        self.outcome.died[death["phase"]] += 1
        self.outcome.operations[f"{workload.name}: {death['phase']}: {death['operation']}"] += 1
        if self._goes_on(workload, point, folder, ended, expected):
            shutil.rmtree(folder)
        return True

    def try_want(self, workload: Workload, want: Want) -> str | None:
        """Let a command run out of disk, then go on with room again; what it said, or None if it never came to that."""
        _, expected = self.profile(workload)
        self._number += 1
        folder = self._begin(workload, f"{self._number:05d}")
        name, point = f"disk full: {want.kind}", Point(want.kind, want.number)
        self.outcome.tried[name] += 1
        ended = self._commands.run(workload.args, folder, workload.ranks, want=asdict(want))
        if not (folder / DEATH).exists():
            self.outcome.finished_first += 1
            shutil.rmtree(folder)
            return None
        self.outcome.died[name] += 1
        text = (folder / "0.err").read_text(encoding="utf-8").strip()
        if ended["codes"][0] not in (0, 2) or "Traceback" in text:
            self._lose(workload, point, f"ended with {ended['codes'][0]}", text[-3000:])
        elif self._goes_on(workload, point, folder, ended, expected):
            shutil.rmtree(folder)
        return text if ended["codes"][0] else ""

    def _goes_on(
        self, workload: Workload, point: Point, folder: Path, ended: dict[str, Any], expected: dict[str, Any]
    ) -> bool:
        others = [r for r in range(workload.ranks) if r != point.rank]
        for rank in others:
            code, text = ended["codes"][rank], (folder / f"{rank}.err").read_text()
            if code < 0:
                return self._lose(workload, point, f"rank {rank} ended by signal {-code}", text[-2000:])
            if code and "Traceback" in text:
                return self._lose(workload, point, f"rank {rank} ended with a traceback", text[-3000:])
        if faults := unreadable(folder):
            return self._lose(workload, point, "published checkpoints are unreadable", "; ".join(faults))
        whole = workload.args[0] == "prepare" and (folder / "prepared").exists()
        if not whole:
            again = self._commands.run(workload.args, folder, workload.ranks)
            if any(again["codes"]):
                return self._lose(workload, point, "does not go on", said(folder, workload.ranks))
        try:
            found = result_of(workload, folder)
        except Exception as error:
            return self._lose(workload, point, f"left no result: {type(error).__name__}: {error}", "")
        if faults := unreadable(folder):
            return self._lose(workload, point, "published checkpoints are unreadable at the end", "; ".join(faults))
        if differing := difference(found, expected):
            return self._lose(workload, point, "ended with something else", ", ".join(differing[:12]))
        return True

    def _begin(self, workload: Workload, name: str) -> Path:
        folder = self._folder / f"{workload.name.replace(' ', '-')}-{name}"
        if workload.begun is None:
            folder.mkdir(parents=True)
            return folder
        begun = self._folder / f"{workload.name.replace(' ', '-')}-begun"
        if not begun.exists():
            ended = self._commands.run(workload.begun, begun, workload.ranks)
            assert not any(ended["codes"]), said(begun, workload.ranks)
            for summary in begun.glob("runs/*/*/summary.json"):
                summary.unlink()
        shutil.copytree(begun, folder)
        return folder

    def _lose(self, workload: Workload, point: Point, what: str, said: str) -> bool:
        kept = self._folder / f"{workload.name.replace(' ', '-')}-{self._number:05d}"
        lost = {"workload": workload.name, "point": point.to_dict(), "what": what, "said": said, "folder": str(kept)}
        self.outcome.lost.append(lost)
        return False


def said(folder: Path, ranks: int) -> str:
    """The ends of what all ranks wrote to stderr."""
    texts = ((rank, (folder / f"{rank}.err").read_text(encoding="utf-8")) for rank in range(ranks))
    return "\n".join(f"rank {rank}: {text.strip()[-2500:]}" for rank, text in texts)
