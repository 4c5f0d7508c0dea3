"""Define the two-tower model, which scores an item by the product of a user vector and an item vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.batch import Batch
from hotbed.checks import check_known
from hotbed.embed import EmbeddingCollection
from hotbed.errors import SpecError
from hotbed.nn.layers import MLP
from hotbed.nn.models import dense_inputs, refuse_sequences
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class TwoTower(nn.Module):
    """Two towers (Yi et al., RecSys 2019, figure 1): ``s(x, y) = ⟨u(x), v(y)⟩ ÷ temperature`` with vectors of norm 1.

    A recipe trains the score as the logit of a label. With a section ``retrieval``, it trains the vectors of
    ``model(batch, vectors=True)`` with `InBatchSoftmax` instead, to find items among all items.

    Parameters
    ----------
    tables, features, dense_features
        See `EmbeddingCollection`. Tables may have any dims. Dense inputs belong to the user tower.
    item, widths
        Features of the item tower, and widths of both MLPs. The user tower has all other features. The last width is
        the width of the vectors.
    temperature, dropout, seed, backend
        Divisor of products. For the other parameters, see `DCNv2`.

    Raises
    ------
    SpecError
        If a feature is not pooled, a tower has no feature, or the temperature is not above 0.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 0,
        *,
        item: Sequence[str],
        widths: Sequence[int] = (256, 64),
        temperature: float = 0.05,
        dropout: float = 0.0,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        refuse_sequences(self, features)
        dims = {f.name: table.dim for f in features for table in tables if table.name == f.table}
        for name in item:
            check_known("TwoTower: item", name, dims, SpecError)
        if not 0 < len(item) < len(dims) or not temperature > 0:
            raise SpecError(
                f"TwoTower: got item {list(item)} of features {list(dims)} and temperature {temperature}, expected at "
                "least one feature for each tower and a temperature above 0"
            )
        self.towers = {"user": [name for name in dims if name not in item], "item": list(item)}
        self.dense_features, self.temperature = dense_features, temperature
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        inputs = {tower: sum(dims[name] for name in names) for tower, names in self.towers.items()}
        self.user = MLP(inputs["user"] + dense_features, widths, last_relu=False, dropout=dropout)
        self.item = MLP(inputs["item"], widths, last_relu=False, dropout=dropout)

    def forward(self, batch: Batch, *, vectors: bool = False, users: int | None = None) -> Tensor | tuple[Tensor, ...]:
        """Return logits ``[B, 1]`` float32, or with ``vectors`` the vectors ``[B, D]`` of users and items.

        ``users`` limits user vectors to the first samples.
        """
        dense = dense_inputs(self, batch, self.dense_features)
        found = self.embeddings(batch.sparse)
        x, y = ([found[name].float() for name in names] for names in self.towers.values())
        inputs = torch.cat([*x, *([] if dense is None else [dense])], dim=1)[:users]
        user = F.normalize(self.user(inputs).float(), dim=1)
        item = F.normalize(self.item(torch.cat(y, dim=1)).float(), dim=1)
        return (user, item) if vectors else (user * item).sum(dim=1, keepdim=True) / self.temperature
