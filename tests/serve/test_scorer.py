"""Protects that a row's score has the same bits alone, among any others, in any order, and of any number of threads."""

import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.batch import Batch
from hotbed.errors import BatchError
from hotbed.nn.dense_part import DensePart, traced
from hotbed.serve.scorer import BLOCK_ROWS, Scorer
from tests.serve.models import MODELS, batch_of, model_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", MODELS)
def test_a_row_s_score_is_its_own(kind: str) -> None:
    model, batch = model_of(kind), batch_of(3 * BLOCK_ROWS + 5)
    with torch.no_grad():
        expected = model(batch).double().sigmoid().numpy()
    part = DensePart(model)
    with Scorer(part, dict(part.collections), part.features, threads=2) as scorer:
        scores = scorer(batch)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)
        shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
        np.testing.assert_array_equal(scorer(batch.take(shuffled)), scores[shuffled.numpy()])
        for rows in ([0], [100], [7, 7, 7], list(range(31)), list(range(40, 73))):
            np.testing.assert_array_equal(scorer(batch.take(torch.tensor(rows))), scores[rows])
        program = traced(part, 2).module()
        scorer.replace_dense(program)
        np.testing.assert_array_equal(scorer(batch), scores)
    with Scorer(program, dict(part.collections), part.features, threads=1) as scorer:
        np.testing.assert_array_equal(scorer(batch), scores)


def test_products_of_a_block_sum_each_row_alike() -> None:
    """Also in shapes that no model here has; a library of which this is not true needs another size of blocks."""
    before, draw = torch.get_num_threads(), torch.Generator().manual_seed(0)
    torch.set_num_threads(1)
    try:
        for inputs in (1, 13, 16, 100, 383, 512, 1024):
            for outputs in (1, 2, 3, 7, 16, 64, 512):
                weight, bias = (torch.randn(*shape, generator=draw) for shape in ((outputs, inputs), (outputs,)))
                x = torch.randn(BLOCK_ROWS, inputs, generator=draw)
                order = torch.randperm(BLOCK_ROWS, generator=draw)
                assert torch.equal(F.linear(x[order], weight, bias), F.linear(x, weight, bias)[order])
                alone = x[:1].expand(BLOCK_ROWS, -1).contiguous()
                assert torch.equal(F.linear(alone, weight, bias)[-1], F.linear(x, weight, bias)[0])
    finally:
        torch.set_num_threads(before)


def test_threads_of_others_stay_as_many() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found: list[int] = []
    try:
        with Scorer.of_model(model_of("DLRM"), CPU) as scorer:
            scorer(batch_of(70))
            thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert [torch.get_num_threads(), *found] == [2, 2]
    finally:
        torch.set_num_threads(before)


class OfIds(nn.Module):
    """A model that asks its batch for more than vectors and numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        count = batch.sparse["tags"].lengths() + (batch.sparse["user"].values == 3)
        return self.model(batch) + count[:, None] + batch.extra["bias"][:, None]


def test_a_model_may_ask_for_ids_and_further_columns() -> None:
    batch = batch_of(40)
    batch = Batch(sparse=batch.sparse, dense=batch.dense, extra={"bias": torch.linspace(-2, 2, 40)})
    model = OfIds(model_of("DCNv2"))
    with torch.no_grad():
        expected = model(batch).double().sigmoid().numpy()
    with Scorer.of_model(model, CPU) as scorer:
        np.testing.assert_allclose(scorer(batch), expected, rtol=0, atol=1e-6)


class Sum(nn.Module):
    def forward(self, dense: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        return dense.sum(1)


def test_what_gives_no_logits_is_refused() -> None:
    part = DensePart(model_of("DLRM"))
    with (
        Scorer(Sum(), dict(part.collections), part.features) as scorer,
        pytest.raises(BatchError, match=r"the model gave logits \[32\] for 32 rows, must be \[rows, labels\]"),
    ):
        scorer(batch_of(3))


def test_a_logit_that_is_not_finite_is_no_score() -> None:
    batch = batch_of(3)
    assert batch.dense is not None
    batch.dense[1] = torch.inf
    with Scorer.of_model(model_of("DLRM"), CPU) as scorer:
        assert np.isnan(scorer(batch)).any(1).tolist() == [False, True, False]
