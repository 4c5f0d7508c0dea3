"""A run that is killed again and again, at any moment of training and of saving, ends where one that is not ends."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbed.checkpoint import checkpoints_in, differential, find_checkpoint, load_checkpoint, storage, verify_checkpoint
from hotbed.checkpoint.snapshot import Snapshot
from hotbed.data import Loader
from hotbed.plan import Cut
from hotbed.train import Trainer
from hotbed.train.directory_lock import OWNER
from hotbed.train.runs.callbacks import KeepLast
from tests.train.parallel_cases import RECIPE, TRAIN, InMemory, make_trainer, state_of

EVENTS: list[tuple[Any, str]] = [
    (Trainer, "_advance"),
    (Snapshot, "read"),
    (storage._LocalWriter, "write"),
    (storage._LocalWriter, "finish"),
    (storage.LocalDirectory, "write"),
    (storage.LocalDirectory, "remove"),
    (storage.LocalDirectory, "remove_all"),
]
"""Before or after these a run may be killed."""


def run(folder: Path, count: int, seed: int) -> str:
    """Go on from the newest checkpoint, or begin; die at an event of this number, or return the SHA-256 of it all."""
    torch.set_num_threads(1)
    if count:
        die_at(count, before=random.Random(seed).random() < 0.5)
    keep = KeepLast(folder, RECIPE, every=2, keep_last=2)
    # Whatever the tier that a checkpoint was saved from: files of rows end with their process.
    tier = Cut(tier="disk", cache_rows=40) if seed % 2 else "table"
    # And whatever it held: all rows, or those that changed, though most of these small tables do.
    differential.MOST_SHARE = 10.0
    recipe = replace(TRAIN, epochs=15, checkpoint_full_every=1 + seed % 3)
    trainer = make_trainer(None, tier, recipe=recipe, callbacks=[keep])
    loader = Loader(InMemory(), "train", 40, shuffle=True, window=3)
    newest = find_checkpoint(folder) if checkpoints_in(folder) else None
    if newest is not None:
        verify_checkpoint(newest)
        load_checkpoint(newest, trainer.parts())
        trainer.resume_data(loader)
    trainer.fit(loader)
    digest = hashlib.sha256()
    for name, tensor in sorted(state_of(trainer).items()):
        digest.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def die_at(count: int, *, before: bool) -> None:
    left = [count]

    def killing(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if before and left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = method(*args, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return called

    for owner, name in EVENTS:
        setattr(owner, name, killing(getattr(owner, name)))


def main() -> None:
    """Run what the lines of stdin say, each in a fork of this process, which has run no kernel."""
    for line in sys.stdin:
        folder, count, seed = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.write(writing, run(Path(folder), count, seed).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            found = pipe.read()
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), found]), flush=True)


@pytest.mark.full  # a kill each of some phases: tests/crashes/test_kills.py
def test_a_run_that_is_killed_ends_where_one_that_is_not_ends(tmp_path: Path) -> None:
    kills = 20
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", "from tests.train.test_kills import main; main()"]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def attempt(folder: str, count: int, seed: int = 0) -> tuple[int, str]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(tmp_path / folder), count, seed]) + "\n")
        process.stdin.flush()
        code, found = json.loads(process.stdout.readline())
        return code, found

    try:
        code, expected = attempt("whole", 0)
        assert (code, len(expected)) == (0, 64)
        draw = random.Random(7)
        began: set[str] = set()
        killed = runs = seed = 0
        while killed < kills:
            folder = f"killed-{runs}"
            # Within a checkpoint or two of the last kill, or far enough for several.
            code, found = attempt(folder, draw.randint(1, draw.choice((45, 300))), seed)
            if code == 0:  # how many events a run has depends on how fast it saves; this one ended, another begins
                assert found == expected
                runs += 1
            else:
                assert code == -signal.SIGKILL
                killed += 1
                began |= {checkpoint.name for checkpoint in checkpoints_in(tmp_path / folder)}
            seed += 1
        folder = f"killed-{runs}"
        assert attempt(folder, 0) == (0, expected)
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
    assert len(began) > kills // 4  # kills happened between many checkpoints
    assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [OWNER, "last-00000104", "last-00000105"]
