"""Define the softmax over the items of a batch, corrected for how often each item is in batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.embed.ids import hashed


class InBatchSoftmax(nn.Module):
    """Batch softmax with the correction of sampling bias (Yi et al., RecSys 2019, section 3).

    ``−log (exp(sᵢᵢ − log pᵢ) ÷ Σⱼ exp(sᵢⱼ − log pⱼ))``, with ``sᵢⱼ = ⟨uᵢ, vⱼ⟩ ÷ temperature``: the items of the other
    samples, over several ranks of a rank's own, are the negatives of each. Popular items are so more often than others,
    which taking off the logarithm of their probability ``pⱼ`` makes up for. A sample whose item is sample i's own is no
    negative of it.

    Parameters
    ----------
    temperature
        What products are divided by.
    """

    def __init__(self, temperature: float = 0.05) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, users: Tensor, items: Tensor, ids: Tensor, log_q: Tensor | None = None) -> Tensor:
        """Losses ``[B]`` of vectors ``[B, D]`` of users and items, ids ``[B]`` of the items, and ``log pⱼ`` ``[B]``."""
        with torch.autocast(users.device.type, enabled=False):
            logits = users.float() @ items.float().T / self.temperature
            if log_q is not None:
                logits = logits - log_q.to(logits.dtype)
            own = torch.eye(ids.shape[0], dtype=torch.bool, device=ids.device)
            logits = logits.masked_fill((ids[:, None] == ids) & ~own, -torch.inf)
            return F.cross_entropy(logits, torch.arange(ids.shape[0], device=ids.device), reduction="none")


class ItemFrequencies(nn.Module):
    """Probabilities of items to be in a batch, estimated from the stream of batches (Yi et al. 2019, algorithm 2).

    For each of ``slots`` hashes it keeps the step ``A`` at which an item was last seen, and the mean number ``B`` of
    steps between two such; the probability is ``1 ÷ B``. It follows items that become popular.

    Parameters
    ----------
    slots
        Hashes ``H``; two buffers of as many numbers.
    rate
        Share ``α`` of the newest interval in the mean.
    first
        Interval of an item that was not seen before.
    """

    last: Tensor
    interval: Tensor
    step: Tensor

    def __init__(self, slots: int = 1 << 20, *, rate: float = 0.01, first: float = 100.0) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("last", torch.zeros(slots))
        self.register_buffer("interval", torch.full((slots,), first))
        self.register_buffer("step", torch.zeros(()))

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """``log p`` ``[B]`` float32 of the ids ``[B]`` of a batch's items; in training, after counting the batch."""
        slots = hashed(ids.long(), self.last.shape[0])
        if self.training:
            self.step += 1
            seen = slots.unique()
            self.interval[seen] += self.rate * (self.step - self.last[seen] - self.interval[seen])
            self.last[seen] = self.step
        return -self.interval[slots].clamp(min=1).log()
