"""Define the softmax over the candidates of a batch, corrected for how often each item is a candidate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.embed.ids import hash_ids
from hotbed.errors import SpecError


class InBatchSoftmax(nn.Module):
    """Batch softmax with the correction of sampling bias (Yi et al., RecSys 2019, section 3).

    The loss is ``−log (exp(sᵢᵢ − log pᵢ) ÷ Σⱼ exp(sᵢⱼ − log pⱼ))`` with ``sᵢⱼ = ⟨uᵢ, vⱼ⟩ ÷ temperature``. The negatives
    of a sample are the items of the other samples. Popular items are negatives more often than other items. Subtracting
    the logarithm of their probability ``pⱼ`` corrects this bias. A candidate that equals sample i's own item is not a
    negative of sample i. Candidates can also be items of other ranks and random items. ``pⱼ`` is then the sum of
    both probabilities (mixed negative sampling, Yang et al., WWW 2020).

    Parameters
    ----------
    temperature
        Divisor of products.
    hardest
        Number of negatives per sample that count, the ones with the largest products. None: all negatives.
    """

    def __init__(self, temperature: float = 0.05, hardest: int | None = None) -> None:
        super().__init__()
        if not temperature > 0 or (hardest is not None and hardest < 1):
            raise SpecError(
                f"InBatchSoftmax: got temperature {temperature} and hardest {hardest}, expected a temperature above 0, "
                "and hardest of at least 1, or None for all negatives"
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
        """Return losses ``[B]``.

        Parameters
        ----------
        users, items
            Vectors ``[B, D]`` of samples and ``[N, D]`` of candidates.
        ids, log_q
            Item ids of the candidates ``[N]``, and the logarithm of each item's probability to be a candidate ``[N]``.
            Without ``log_q``, all items have the same probability.
        own
            Index of each sample's own candidate ``[B]`` (default: i for sample i).
        negative_of
            ``[N]`` restricts a candidate to be a negative of only one sample. The value is the index of that sample's
            own candidate, or −1 for a negative of all samples (default: −1 for all candidates).
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
    """Probabilities that items are in a batch, estimated from the sequence of batches (Yi et al. 2019, algorithm 2).

    For each of ``slots`` hashes, it keeps the last step ``A`` with an item of this hash, and the mean number ``B`` of
    steps between two such steps. The probability is ``1 ÷ B``. The estimate adapts to items that become popular.

    Parameters
    ----------
    slots
        Number of hashes ``H``. Two buffers have this size.
    rate
        Weight ``α`` of the newest interval in the mean.
    first
        Initial interval of an item.
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
        """Return ``log p [B]`` float32 for the item ids ``[B]`` of a batch. In training, count the batch first."""
        slots = hash_ids(ids.long(), self.last.shape[0])
        if self.training:
            self.step += 1
            seen = slots.unique()
            self.interval[seen] += self.rate * (self.step - self.last[seen] - self.interval[seen])
            self.last[seen] = self.step
        return -self.interval[slots].clamp(min=1).log()
