"""A process that hangs, or whose parent is gone, ends itself and says why."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hotbed import comm
from hotbed.config import ParallelRecipe, TrainRecipe
from hotbed.errors import RecipeError
from hotbed.train.ranks.process_group import Watchdog, limit_of
from tests.train.launcher import PATIENCE_S
from tests.train.parallel_cases import RECIPE

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
