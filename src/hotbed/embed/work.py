"""What the tables of a rank are asked to do, to see whether ranks are asked alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class Work:
    """Counts of one rank.

    Attributes
    ----------
    lookups
        Rows read, for this rank and for others.
    seconds
        Time of the host in which rows were read and updated, without exchanges; a GPU may do it later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lookups = 0
        self.seconds = 0.0

    @contextmanager
    def counted(self, lookups: int = 0) -> Generator[None]:
        """Count what happens inside."""
        start = time.perf_counter()
        yield
        with self._lock:  # rows of a batch may be fetched by another thread
            self.seconds += time.perf_counter() - start
            self.lookups += lookups
