"""Processes of a world on this machine: the one that fails is told, and nothing is left running."""

import subprocess
import sys
from pathlib import Path

import pytest

from hotbed.errors import CommError
from hotbed.train.ranks.process_group import first_failure, run_local


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
