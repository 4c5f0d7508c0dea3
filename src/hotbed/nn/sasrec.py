"""Define SASRec: causal self-attention over a history, which predicts the next item."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hotbed.nn.attention import CausalAttention
from hotbed.nn.histories import NextItem
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class SASRec(NextItem):
    """Self-attentive sequential recommendation (Kang and McAuley 2018, arXiv 1808.09781).

    The blocks process vectors of items and positions (equation 1). Their output is normalized, as in the authors' code.
    A logit is the product of the output and the candidate's vector of the same table (equation 6). A label is 1 for the
    next item and 0 for a randomly drawn item (equation 7). The parameters are the parameters of `NextItem`, the number
    of ``blocks``, and their ``heads`` and ``dropout``.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 0,
        *,
        history: str,
        item: str,
        max_len: int = 50,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.2,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__(tables, features, dense_features, history, item, max_len, dropout, seed, backend)
        self.blocks = nn.Sequential(*(CausalAttention(self.dim, heads, dropout) for _ in range(blocks)))
        self.norm = nn.LayerNorm(self.dim)

    def encode(self, x: Tensor) -> Tensor:
        """Apply all blocks (equation 5)."""
        return self.norm(self.blocks(x))
