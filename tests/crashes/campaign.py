"""Kill commands at drawn points, let them go on, and compare what they end with."""

from __future__ import annotations

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

from tests.crashes.exchanges import Fault
from tests.crashes.points import COUNTS, DEATH, Point
from tests.crashes.wants import Want
from tests.crashes.workloads import Workload, difference, result_of, unreadable
from tests.train.launcher import ROOT, unused_port

LIMIT_S = 240
"""A process that takes longer hangs."""


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
        self,
        args: Sequence[str],
        folder: Path,
        ranks: int = 1,
        point: Point | None = None,
        want: Any = None,
        whole: str | None = None,
        fault: Fault | None = None,
    ) -> dict[str, Any]:
        """Run a command; its exit codes by rank, and when each rank ended. ``whole``: the phase that all of it is."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DEATH).unlink(missing_ok=True)
        replaced = [arg.replace("FOLDER", str(folder)).replace("DATA", str(self.data)) for arg in args]
        task = {
            "folder": str(folder),
            "args": replaced,
            "ranks": ranks,
            "port": unused_port() if ranks > 1 else 0,
            "point": None if point is None else point.to_dict(),
            "want": want,
            "whole": whole,
            "fault": None if fault is None else asdict(fault),
            "limit_s": LIMIT_S,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@dataclass
class Outcome:
    """What has been tried: a record for each point, in the order in which they were.

    A record has the workload, the phase and its index there, from which it is drawn; the operation, its number and
    whether the process died before it (null where it finished first, which does not count); for several ranks, which
    one died and how many seconds later the last of the others ended; what was lost, or null.
    """

    points: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lost(self) -> list[dict[str, Any]]:
        """Records of what was not as promised."""
        return [point for point in self.points if point["lost"] is not None]

    @property
    def died(self) -> Counter[str]:
        """Points by phase, but those before which a run had finished."""
        return Counter(point["phase"] for point in self.points if point["operation"] is not None)

    @property
    def finished_first(self) -> int:
        """Points that runs finished before."""
        return sum(point["operation"] is None for point in self.points)

    def of(self, workload: str, phase: str) -> list[dict[str, Any]]:
        """Points of a phase of a workload."""
        return [point for point in self.points if (point["workload"], point["phase"]) == (workload, phase)]


class Campaign:
    """Tries points of workloads, each drawn from a seed, its workload, phase and index.

    Parameters
    ----------
    commands
        Runs them.
    folder
        Where they run; what was lost stays there.
    seed
        Of the points.
    outcome
        Of an earlier campaign, which this one goes on with.
    """

    def __init__(self, commands: Commands, folder: Path, seed: int, outcome: Outcome | None = None) -> None:
        self._commands, self._folder, self._seed = commands, folder, seed
        self._profiles: dict[str, tuple[dict[str, list[int]], dict[str, Any]]] = {}
        self.outcome = Outcome() if outcome is None else outcome

    def profile(self, workload: Workload) -> tuple[dict[str, list[int]], dict[str, Any]]:
        """How many operations each phase of an undisturbed run has, by rank, and what it ends with."""
        if workload.name not in self._profiles:
            folder = self._begin(workload, "whole")
            ended = self._commands.run(workload.args, folder, workload.ranks, whole=_whole(workload))
            if any(ended["codes"]):
                raise AssertionError(f"{workload.name}: {ended}\n{said(folder, workload.ranks)}")
            counts = [json.loads((folder / f"{rank}.{COUNTS}").read_text()) for rank in range(workload.ranks)]
            by_phase = {phase: [of["phases"].get(phase, 0) for of in counts] for phase in workload.phases}
            self._profiles[workload.name] = by_phase, result_of(workload, folder)
        return self._profiles[workload.name]

    def try_point(self, workload: Workload, phase: str) -> bool:
        """Kill a command in this phase, and let it go on to its end; False if it finished before its point."""
        counts, expected = self.profile(workload)
        taken = {point["index"] for point in self.outcome.of(workload.name, phase)}
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        draw = random.Random(f"{self._seed}/{workload.name}/{phase}/{index}")
        rank = draw.choice([rank for rank, count in enumerate(counts[phase]) if count] or [-1])
        if rank < 0:
            raise AssertionError(f"{workload.name} has no operation of phase {phase}: {counts}")
        point = Point(phase, draw.randint(1, counts[phase][rank]), draw.random() < 0.5, rank)
        folder = self._begin(workload, f"{phase}-{index:03d}")
        ended = self._commands.run(workload.args, folder, workload.ranks, point, whole=_whole(workload))
        record = {"workload": workload.name, "phase": phase, "index": index, "operation": None, "lost": None}
        if ended["codes"][rank] == -9:
            death = json.loads((folder / DEATH).read_text())
            record |= {"operation": death["operation"], "number": death["number"], "before": point.before}
            if workload.ranks > 1:
                others = max(at for r, at in enumerate(ended["ended"]) if r != rank)
                record |= {"rank": rank, "others_s": round(others - ended["ended"][rank], 2)}
            record["lost"] = self._fault(workload, rank, folder, ended, expected)
        elif any(ended["codes"]):
            record["lost"] = f"failed without being killed\n{said(folder, workload.ranks)}"
        self._add(record, folder)
        return record["operation"] is not None

    def try_want(self, workload: Workload, want: Want) -> str | None:
        """Let a command run out of disk, then go on with room again; what it said, or None if it never came to that."""
        _, expected = self.profile(workload)
        folder = self._begin(workload, f"{want.kind}-{want.number}")
        record = {"workload": workload.name, "phase": f"disk full: {want.kind}", "index": want.number}
        record |= {"operation": None, "lost": None}
        ended = self._commands.run(workload.args, folder, workload.ranks, want=asdict(want))
        text = None
        if (folder / DEATH).exists():
            text = (folder / "0.err").read_text(encoding="utf-8").strip()
            record["operation"] = f"write of {want.kind}"
            if ended["codes"][0] not in (0, 2) or "Traceback" in text:
                record["lost"] = f"ended with {ended['codes'][0]}\n{text[-3000:]}"
            else:
                record["lost"] = self._fault(workload, 0, folder, ended, expected)
                text = text if ended["codes"][0] else ""
        self._add(record, folder)
        return text

    def _add(self, record: dict[str, Any], folder: Path) -> None:
        self.outcome.points.append(record)
        if record["lost"] is None:
            shutil.rmtree(folder)

    def _fault(
        self, workload: Workload, died: int, folder: Path, ended: dict[str, Any], expected: dict[str, Any]
    ) -> str | None:
        """What is not as promised after a death; None if nothing is."""
        for rank, code in enumerate(ended["codes"]):
            text = (folder / f"{rank}.err").read_text()
            if rank != died and code < 0:
                return f"rank {rank} ended by signal {-code}\n{text[-2000:]}"
            if rank != died and code and "Traceback" in text:
                return f"rank {rank} ended with a traceback\n{text[-3000:]}"
        if faults := unreadable(folder):
            return f"published checkpoints are unreadable: {'; '.join(faults)}"
        if workload.whole is None or not (folder / workload.whole).exists():
            again = self._commands.run(workload.args, folder, workload.ranks, whole=_whole(workload))
            if any(again["codes"]):
                return f"does not go on\n{said(folder, workload.ranks)}"
        try:
            found = result_of(workload, folder)
        except Exception as error:
            return f"left no result: {type(error).__name__}: {error}"
        if faults := unreadable(folder):
            return f"published checkpoints are unreadable at the end: {'; '.join(faults)}"
        if differing := difference(found, expected):
            return f"ended with something else: {', '.join(differing[:12])}"
        return None

    def _begin(self, workload: Workload, name: str) -> Path:
        folder = self._folder / f"{workload.slug}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        if workload.begun is None:
            folder.mkdir(parents=True)
            return folder
        begun = self._folder / f"{workload.slug}-begun"
        if not begun.exists():
            ended = self._commands.run(workload.begun, begun, workload.ranks)
            assert not any(ended["codes"]), said(begun, workload.ranks)
            for summary in begun.glob("runs/*/*/summary.json"):
                summary.unlink()
        shutil.copytree(begun, folder)
        return folder


def _whole(workload: Workload) -> str | None:
    """The one phase that all of a command is that does not train."""
    return None if workload.makes is None else workload.phases[0]


def said(folder: Path, ranks: int) -> str:
    """The ends of what all ranks wrote to stderr."""
    texts = ((rank, (folder / f"{rank}.err").read_text(encoding="utf-8")) for rank in range(ranks))
    return "\n".join(f"rank {rank}: {text.strip()[-2500:]}" for rank, text in texts)
