"""Models whose forward or backward pass kills, stops or holds up its process, for tests in several processes."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.nn import DLRM


class DiesTwice(DLRM):
    """Ends a rank's process in the eighth batch of torchrun's first attempt, and another's of the second."""

    deaths = ((0, 0), (1, 1))
    """Attempt and rank of each."""

    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            self.batches = getattr(self, "batches", 0) + 1
            attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), torch.distributed.get_rank()
            if self.batches == 8 and (attempt, rank) in self.deaths:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


class Compiles(DLRM):
    """Takes for ever in its first batch, in code that Python cannot interrupt."""

    def forward(self, batch: Batch) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # the most iterations that there can be
        return super().forward(batch)


class Slow(DLRM):
    """Takes a while for each batch that it trains on, so that a test can act meanwhile."""

    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            time.sleep(0.15)
        return super().forward(batch)


class Hangs(DLRM):
    """Never ends its fourth batch on the last rank."""

    def forward(self, batch: Batch) -> Tensor:
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches == 4 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            self.hang()
        return super().forward(batch)

    def hang(self) -> None:
        """Wait without an end."""
        threading.Event().wait()
