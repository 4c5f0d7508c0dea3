"""Protects: TorchRec's examples train as with TorchRec when their imports are changed, in one and two processes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

from tests.compat.torchrec_examples import EXAMPLES, library
from tests.ranks import Ranks

ROOT = Path(__file__).parents[2]
TORCHRUN = ROOT / "benchmarks" / "peers" / ".venv" / "bin" / "torchrun"

# Printed by TorchRec 1.8.0 with FBGEMM 1.8.0 and torch 2.13.0 on a CPU, for N = 1 and 2:
#   torchrun --nproc_per_node N -m tests.compat.torchrec_examples NAME torchrec
LOSSES: dict[str, dict[int, list[list[float]]]] = {
    "golden": {
        1: [[0.7072856426, 0.6997432113, 0.6865404248, 0.7235096693, 0.7028334737, 0.6971795559]],
        2: [
            [0.7072856426, 0.7169700265, 0.6711853743, 0.7027732134, 0.7572529912, 0.7026526928],
            [0.6641513705, 0.7335375548, 0.7151595950, 0.7130911350, 0.8239275217, 0.6556262970],
        ],
    },
    "two_tower": {
        1: [[0.6954213977, 0.6933764219, 0.6978419423, 0.6841771603, 0.6995650530, 0.6939198375, 0.0363280848]],
        2: [
            [0.6954213977, 0.6908183098, 0.6974690557, 0.6906484365, 0.7061185837, 0.7086837292, 0.0421651639],
            [0.6979965568, 0.6972833872, 0.6883128881, 0.6718990803, 0.7081626058, 0.6872930527],
        ],
    },
}


def losses(group: ProcessGroup, name: str) -> list[float]:
    return EXAMPLES[name](library("hotbed"), group.rank())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_losses_are_those_of_torchrec(ranks: Ranks, name: str, size: int) -> None:
    for found, expected in zip(ranks.run(size, losses, name), LOSSES[name][size], strict=True):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.skipif(not TORCHRUN.exists(), reason="`make bench-peers` installs TorchRec")
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_recorded_losses_are_those_of_torchrec(name: str) -> None:
    command = [TORCHRUN, "--standalone", "--nproc_per_node", "1", "-m", "tests.compat.torchrec_examples"]
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([*command, name, "torchrec"], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    (found,) = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("[[")))
    assert found == pytest.approx(LOSSES[name][1][0], abs=1e-6)
