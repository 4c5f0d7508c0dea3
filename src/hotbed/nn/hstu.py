"""Define HSTU: causal attention over a history without a softmax, so that the size of weights has a meaning."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hotbed.nn.attention import SequentialTransduction
from hotbed.nn.histories import NextItem
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class HSTU(NextItem):
    """Hierarchical sequential transduction units (Zhai et al. 2024, arXiv 2402.17152) that rank next items.

    The layers process vectors of items and positions. A logit is the product of their output and the candidate's vector
    of the same table. The parameters are the parameters of `NextItem`, the number of ``layers``, and their ``heads``
    and ``dropout``.
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
        layers: int = 2,
        heads: int = 1,
        dropout: float = 0.2,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__(tables, features, dense_features, history, item, max_len, dropout, seed, backend)
        made = (SequentialTransduction(self.dim, self.length, heads, dropout) for _ in range(layers))
        self.layers = nn.Sequential(*made)

    def encode(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        return self.layers(x)
