"""Jobs of other frameworks that are killed go on from their checkpoints (docs/elastic.md)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.launcher import PATIENCE_S, ROOT, wait_until

JOB = ROOT / "docs" / "jobs" / "lightning_job.py"


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder.parent / f"{folder.name}.err").open("wb") as file:
        return subprocess.Popen(
            [*command, "--max-restarts", "1", str(JOB), str(folder), "60"],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )


@pytest.mark.full
def test_a_lightning_job_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    whole, killed = start(tmp_path / "whole"), start(tmp_path / "killed")
    try:
        wait_until(lambda: killed.poll() is not None or (tmp_path / "killed" / "last.ckpt").exists(), str)
        assert killed.poll() is None
        children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert whole.wait(PATIENCE_S) == 0, (tmp_path / "whole.err").read_text()[-3000:]
        assert killed.wait(PATIENCE_S) == 0, (tmp_path / "killed.err").read_text()[-3000:]
    finally:
        whole.kill()
        killed.kill()
    said = (tmp_path / "killed.err").read_text()
    assert "Signal 9 (SIGKILL)" in said or "exitcode: -9" in said
    assert "Restoring states from the checkpoint" in said or "Restored all states" in said
    states = [torch.load(tmp_path / name / "final.ckpt", weights_only=True) for name in ("whole", "killed")]
    assert states[0]["global_step"] == states[1]["global_step"]
    expected, found = (state["state_dict"] for state in states)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
