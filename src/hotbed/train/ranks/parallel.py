"""Exchange losses, predictions and names between the ranks of a run.

Ids, rows and gradients of the model are exchanged by `hotbed.embed`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hotbed.comm import Link, reason
from hotbed.embed import Distributed
from hotbed.errors import CommError, HotbedError
from hotbed.store.memory import to_device
from hotbed.virtual_ranks import VirtualRanks, tree_additions


class Ranks:
    """Exchange small values between the ranks of a run; there is one rank if the model is not distributed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model if isinstance(model, Distributed) else None
        self.rank = 0 if self._model is None else self._model.link.rank
        self.size = 1 if self._model is None else self._model.link.size
        self.virtual = VirtualRanks(0, 1) if self._model is None else self._model.virtual
        self._most = max(len(self.virtual.block(rank)) for rank in range(self.size))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.rank == 0

    @property
    def link(self) -> Link | None:
        """Link for small exchanges; None if the model is not distributed."""
        return None if self._model is None else self._model.link

    def sync(self) -> None:
        """Average the replicas of the model's tables; all ranks must call this."""
        if self._model is not None:
            self._model.sync()

    def at_step(self, step: int) -> None:
        """Set the step number that error messages of exchanges contain."""
        if self._model is not None:
            self._model.link.step = step

    @contextmanager
    def explained(self) -> Generator[None]:
        """If an exchange inside the context fails, raise a `CommError` that names the failed rank."""
        try:
            yield
        except HotbedError:
            raise
        except RuntimeError as error:
            if self._model is not None and self._model.dense_link.failure is not None:
                raise self._model.dense_link.failure from error
            is_collective = isinstance(error, dist.DistError) or "/gloo/" in str(error)
            # After an error that is not about an exchange, ranks that wait for this rank would seem unreachable.
            gone = [] if self.link is None or not is_collective else self.link.unreachable()
            if not gone or self.link is None:
                raise
            raise CommError(
                f"{self.link.here}: {_ranks(gone)} ended or does not answer "
                f"({reason(error).splitlines()[0]}). See that rank's log"
            ) from error

    @contextmanager
    def together(self, action: str) -> Generator[None]:
        """If the body raises on a rank, raise on all ranks that this rank cannot do ``action``.

        All ranks must call this. The body must not exchange anything.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        failed = self.gather(torch.tensor([error is not None])).nonzero().flatten().tolist()
        if error is not None:
            raise error
        if failed:
            raise CommError(f"{_ranks(failed)} cannot {action}. See that rank's log")

    def add(self, *values: float | Tensor) -> list[float]:
        """Return the sum of each value over ranks, added in rank order; all ranks must call this."""
        return [sum(column) for column in self._columns(values)]

    def largest(self, *values: float) -> list[float]:
        """Return the maximum of each value over ranks; all ranks must call this."""
        return [max(column) for column in self._columns(values)]

    @property
    def adds_on_devices(self) -> bool:
        """Whether `sums` only queues its work on the device, so that the host need not wait for the result."""
        return self.size == 1 or (self.link is not None and not self.link.overlaps)

    def sums(self, losses: Sequence[Tensor], *values: float) -> Tensor:
        """Return sums over ranks as float64 ``[1 + values]`` on the device of the losses, without waiting.

        The first one is the sum of the losses of all virtual ranks along the tree (`hotbed.virtual_ranks`). ``losses``
        are this rank's. All ranks must call this.
        """
        of_ranks = self._by_rank([*losses, *[-0.0] * (self._most - len(losses)), *values])
        if self.virtual.are_processes and self.size == 2:
            return of_ranks.sum(0)
        own = [of_ranks[rank, : len(self.virtual.block(rank))] for rank in range(self.size)]
        return torch.cat([sum_virtual_ranks(torch.cat(own))[None], of_ranks[:, self._most :].sum(0)])

    def add_losses(self, losses: Sequence[Tensor], *values: float) -> list[float]:
        """Return the sums of `sums` as numbers; all ranks must call this."""
        if self.link is None:
            (loss,) = losses
            return [float(loss.detach()), *map(float, values)]
        of_ranks = self._by_rank([*losses, *[-0.0] * (self._most - len(losses)), *values]).tolist()
        own = [v for rank, row in enumerate(of_ranks) for v in row[: len(self.virtual.block(rank))]]
        for i, j in tree_additions(range(self.virtual.total)):
            own[i] += own[j]
        return [own[0], *map(sum, zip(*(row[self._most :] for row in of_ranks), strict=True))]

    def _columns(self, values: Sequence[float | Tensor]) -> list[list[float]]:
        """For each value, return the list of this value on all ranks, in rank order."""
        if self.link is None:
            return [[float(v.detach()) if isinstance(v, Tensor) else float(v)] for v in values]
        return [list(column) for column in zip(*self._by_rank(values).tolist(), strict=True)]

    def _by_rank(self, values: Sequence[float | Tensor]) -> Tensor:
        """Return the values of all ``W`` ranks as a float64 tensor ``[W, values]``."""
        assert self.link is not None
        device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
        known = [0.0 if isinstance(v, Tensor) else float(v) for v in values]
        own = to_device(torch.tensor(known, dtype=torch.float64, device="cpu"), device)
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                own[i] = value.detach()
        return self.link.all_gather("losses and sizes", own).wait()

    def gather(self, values: Tensor) -> Tensor:
        """Return the rows of all ranks ``[Σ n, …]`` in rank order; each rank passes its own ``[n, …]``."""
        if self.link is None:
            return values
        counts = self.link.all_gather("numbers of samples", torch.tensor([len(values)], device=values.device)).wait()
        padded = values.new_zeros(int(counts.max()), *values.shape[1:])
        padded[: len(values)] = values
        # Sent as bytes, so that any dtype is possible
        rows = self.link.all_gather("predictions", padded.view(torch.uint8)).wait()
        return torch.cat([row.view(values.dtype)[:n] for row, n in zip(rows, counts.flatten().tolist(), strict=True)])

    def add_counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return, for each name, the sum of the counts of all ranks; all ranks must call this.

        A rank may omit names with count 0.
        """
        if self.link is None:
            return dict(counts)
        names = self.names(sorted(counts))
        sums = self.add(*(float(counts.get(name, 0)) for name in names)) if names else []
        return {name: int(total) for name, total in zip(names, sums, strict=True)}

    def names(self, own: Sequence[str]) -> list[str]:
        """Return the distinct names of all ranks in sorted order; all ranks must call this."""
        if self.link is None:
            return sorted(own)
        text = torch.frombuffer(bytearray("".join(f"{name}\n" for name in ["", *own]).encode()), dtype=torch.uint8)
        found = bytes(self.gather(text).tolist()).decode()
        return sorted({name for name in found.split("\n") if name})

    def path(self, path: Path | None) -> Path:
        """Return the ``path`` of the first rank; all ranks must call this."""
        if self.link is None:
            assert path is not None
            return path
        return Path(self.names([] if path is None or not self.is_first else [str(path)])[0])


def sum_virtual_ranks(values: Tensor) -> Tensor:
    """Sum the values of all virtual ranks ``[V, …]`` along the tree."""
    while len(values) > 1:
        if len(values) % 2:
            values = torch.cat([values, torch.full_like(values[:1], -0.0)])  # the neutral element of additions
        values = values[::2] + values[1::2]
    return values[0]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "one of ranks ") + ", ".join(map(str, ranks))
