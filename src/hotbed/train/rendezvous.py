"""`fresh_store`: where ranks that torchrun starts meet, also when it starts them again.

torchrun's agent keeps one store for all attempts. In it are the addresses of ranks that are dead, which new ones would
try to reach: Gloo's "Connection refused" (pytorch/pytorch#135712, #167288). ``TORCHELASTIC_RESTART_COUNT`` cannot tell
attempts apart, because every node counts for itself. So the ranks of an attempt find each other first:

1. Rank 0 draws a name for the attempt and announces it, in the place of the name before.
2. Every rank answers under the announced name, which may be an old one, with a name of its own, and looks again.
3. Rank 0 waits for the answers to its name and repeats them. A rank that finds its own name there is in this attempt:
   who repeated it has read what this process wrote.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

_PAUSE_S = 0.02


def fresh_store(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Part of a store that only these ranks use; all must call this.

    Parameters
    ----------
    store
        Shared by all ranks, and by those of earlier attempts.
    rank, size
        This rank, and how many there are.
    timeout
        How long to wait for the others.

    Raises
    ------
    RuntimeError
        If not all ranks come in time.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("hotbed/attempt", own)
        answers: dict[str, str] = {}
        for other in range(1, size):
            _wait_for(store, f"hotbed/{own}/{other}", end)
            answers[str(other)] = store.get(f"hotbed/{own}/{other}").decode()
        store.set(f"hotbed/{own}/all", json.dumps(answers))
        return PrefixStore(f"hotbed/{own}", store)
    while True:
        _wait_for(store, "hotbed/attempt", end)
        attempt = store.get("hotbed/attempt").decode()
        store.set(f"hotbed/{attempt}/{rank}", own)
        if store.check([f"hotbed/{attempt}/all"]):
            answers = json.loads(store.get(f"hotbed/{attempt}/all").decode())
            if answers.get(str(rank)) == own:
                return PrefixStore(f"hotbed/{attempt}", store)
        _pause(end)


def _wait_for(store: Store, key: str, end: float) -> None:
    while not store.check([key]):
        _pause(end)


def _pause(end: float) -> None:
    if time.monotonic() > end:
        raise RuntimeError("not all of them started in time")
    time.sleep(_PAUSE_S)
