"""A model of a user's own, trained by a recipe in one process and in several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.config import Component
from hotbed.embed import EmbeddingCollection
from hotbed.train.runs.build import build_model
from tests.ranks import Ranks

from .parallel_cases import RECIPE, Group, InMemory

pytestmark = pytest.mark.usefixtures("one_thread")

OWN = replace(RECIPE, model=Component(class_path="tests.train.test_own_model.Own"))


class Own(nn.Module):
    """Weights that its constructor makes, tied ones, dropout, and a parameter that no module resets."""

    def __init__(self, tables: Any, features: Any, dense_features: int, seed: int) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        width = sum(table.dim for table in tables) + dense_features
        self.head, self.twin = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.normal_(self.head.weight, std=0.01)
        self.twin.weight = self.head.weight
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("ones", torch.ones(width))

    def forward(self, batch: Batch) -> Tensor:
        assert batch.dense is not None
        x = torch.cat([self.embeddings(batch.sparse).concatenate(), batch.dense], dim=1)
        return self.scale * (self.twin(self.drop(self.head(x))) @ self.ones)[:, None]


def built(group: Group) -> tuple[dict[str, Tensor], bool, Tensor]:
    """State of the model, whether its weights are tied, and what is drawn next."""
    model = build_model(OWN, InMemory(), torch.device("cpu"))
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return state, model.head.weight is model.twin.weight, torch.rand(3)


def test_every_process_has_the_model_that_one_would_have_and_random_numbers_of_its_own(ranks: Ranks) -> None:
    expected, tied, _ = built(None)
    assert tied
    drawn: set[tuple[float, ...]] = set()
    for state, still_tied, random in ranks.run(3, built):
        assert still_tied
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
        drawn.add(tuple(random.tolist()))
    assert len(drawn) == 3
