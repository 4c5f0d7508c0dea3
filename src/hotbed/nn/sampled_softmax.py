"""Define the softmax over the candidates of a batch, corrected for how often each item is among them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.embed.ids import hash_ids
from hotbed.errors import SpecError


class InBatchSoftmax(nn.Module):
    """Batch softmax with the correction of sampling bias (Yi et al., RecSys 2019, section 3).

    ``−log (exp(sᵢᵢ − log pᵢ) ÷ Σⱼ exp(sᵢⱼ − log pⱼ))``, with ``sᵢⱼ = ⟨uᵢ, vⱼ⟩ ÷ temperature``: the items of the other
    samples are the negatives of each. Popular items are so more often than others, which taking off the logarithm of
    their probability ``pⱼ`` makes up for. A candidate that is sample i's own item is no negative of it. Candidates may
    be more than the samples' items: those of other ranks, and items that were drawn, of which ``pⱼ`` is then the sum of
    both probabilities (mixed negative sampling, Yang et al., WWW 2020).

    Parameters
    ----------
    temperature
        What products are divided by.
    hardest
        Negatives of a sample that count, those with the largest products; None: all.
    """

    def __init__(self, temperature: float = 0.05, hardest: int | None = None) -> None:
        super().__init__()
        if not temperature > 0 or (hardest is not None and hardest < 1):
            raise SpecError(
                f"InBatchSoftmax: temperature is {temperature} and hardest {hardest}; the temperature must be above 0, "
                "and hardest at least 1, or None for all negatives"
            )
        self.temperature, self.hardest = temperature, hardest

    def forward(
        self,
        users: Tensor,
        items: Tensor,
        ids: Tensor,
        log_q: Tensor | None = None,
        *,
        own: Tensor | None = None,
        negative_of: Tensor | None = None,
    ) -> Tensor:
        """Losses ``[B]``.

        Parameters
        ----------
        users, items
            Vectors ``[B, D]`` of samples and ``[N, D]`` of candidates.
        ids, log_q
            Of the candidates ``[N]``: which items they are, and the logarithm of how probable these are to be among the
            candidates; None: all alike.
        own
            Which candidate is a sample's own ``[B]``; default: the i-th of sample i.
        negative_of
            The own candidate of the one sample that a candidate is a negative of ``[N]``, or −1 where it is of all;
            default: all are of all.
        """
        own = torch.arange(len(users), device=ids.device) if own is None else own
        with torch.autocast(users.device.type, enabled=False):
            scores = users.float() @ items.float().T / self.temperature
            left_out = ids[own][:, None] == ids
            if negative_of is not None:
                left_out |= (negative_of >= 0) & (negative_of != own[:, None])
            if self.hardest is not None and self.hardest < len(ids):
                negatives = scores.detach().masked_fill(left_out, -torch.inf)
                left_out |= negatives < negatives.topk(self.hardest, dim=1).values[:, -1:]
            left_out = left_out.scatter(1, own[:, None], value=False)
            logits = scores if log_q is None else scores - log_q.to(scores.dtype)
            return F.cross_entropy(logits.masked_fill(left_out, -torch.inf), own, reduction="none")


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
        slots = hash_ids(ids.long(), self.last.shape[0])
        if self.training:
            self.step += 1
            seen = slots.unique()
            self.interval[seen] += self.rate * (self.step - self.last[seen] - self.interval[seen])
            self.last[seen] = self.step
        return -self.interval[slots].clamp(min=1).log()
