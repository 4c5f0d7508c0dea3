"""`Index`: the number of each key, in the order in which keys were added."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from hotbed.ops import cpu_index
from hotbed.ops.cpu_runtime import launch

_FIRST = 1 << 10


class Index:
    """Numbers 0, 1, 2, … of int64 keys that are not negative; any thread may `find` while one adds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all keys."""
        with self._lock:
            self._count = 0
            self._keys = torch.empty(_FIRST // 2, dtype=torch.int64)
            self._make_places(_FIRST)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._keys.nbytes + self._places.nbytes + self._numbers.nbytes

    @property
    def keys(self) -> Tensor:
        """All keys ``[n]``, by number."""
        return self._keys[: self._count]

    def find(self, keys: Tensor) -> Tensor:
        """Number of each key ``[n]``, −1 where it is not there."""
        out = torch.empty(len(keys), dtype=torch.int64)
        with self._lock:
            launch(cpu_index.find, self._places.numpy(), self._numbers.numpy(), keys.numpy(), out.numpy())
        return out

    def add(self, keys: Tensor) -> Tensor:
        """Add distinct keys ``[n]`` that are not there, and return their numbers."""
        with self._lock:
            first, count = self._count, self._count + len(keys)
            if count > len(self._keys):
                grown = torch.empty(max(count, 2 * len(self._keys)), dtype=torch.int64)
                grown[:first] = self._keys[:first]
                self._keys = grown
            self._keys[first:count] = keys
            size = len(self._places)
            if 2 * count > size:  # at most half full: searches stay short
                while 2 * count > size:
                    size *= 2
                self._make_places(size)
                cpu_index.add(self._places.numpy(), self._numbers.numpy(), self._keys[:first].numpy(), 0)
            cpu_index.add(self._places.numpy(), self._numbers.numpy(), keys.numpy(), first)
            self._count = count
        return torch.arange(first, count)

    def _make_places(self, size: int) -> None:
        self._places = torch.full((size,), cpu_index.EMPTY, dtype=torch.int64)
        self._numbers = torch.empty(size, dtype=torch.int64)
