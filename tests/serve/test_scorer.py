"""Protects that a row's score has the same bits alone, among any others, in any order, and of any number of threads."""

import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.batch import Batch
from hotbed.errors import BatchError
from hotbed.nn.dense_program import DensePart, RowWiseLinear, trace_dense_part
from hotbed.serve.scorer import BLOCK_ROWS, LARGER_BLOCKS, Scorer
from tests.serve.models import MODELS, batch_of, model_of

CPU = torch.device("cpu")


def scorer_of(part: DensePart, model: nn.Module | None = None, threads: int = 1) -> Scorer:
    """A scorer of a model, or of its dense part, with the lookups of that part."""
    return Scorer(model or part, dict(part.collections), part.features, threads=threads)


@pytest.mark.parametrize("kind", MODELS)
def test_a_row_s_score_is_its_own(kind: str) -> None:
    model, batch = model_of(kind), batch_of(6 * BLOCK_ROWS + 5)
    with torch.no_grad():
        expected = model(batch).double().sigmoid().numpy()
    part = DensePart(model)
    with scorer_of(part, threads=2) as scorer:
        scores = scorer(batch)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)
        shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
        np.testing.assert_array_equal(scorer(batch.take(shuffled)), scores[shuffled.numpy()])
        for rows in ([0], [100], [7, 7, 7], list(range(31)), list(range(40, 73))):
            np.testing.assert_array_equal(scorer(batch.take(torch.tensor(rows))), scores[rows])
        program = trace_dense_part(part, 2).module()
        scorer.replace_dense(program)
        np.testing.assert_array_equal(scorer(batch), scores)
    with scorer_of(part, program) as scorer:
        np.testing.assert_array_equal(scorer(batch), scores)


def test_products_of_a_block_sum_each_row_alike() -> None:
    """Also in shapes that no model here has; a library of which this is not true needs another size of blocks."""
    before, draw = torch.get_num_threads(), torch.Generator().manual_seed(0)
    torch.set_num_threads(1)
    try:
        for inputs in (1, 13, 16, 34, 66, 100, 383, 512, 1024):
            for outputs in (1, 2, 3, 5, 7, 16, 20, 64, 512):
                layer = RowWiseLinear(nn.Linear(inputs, outputs))
                with torch.no_grad():
                    layer.weight.normal_(generator=draw)
                x = torch.randn(BLOCK_ROWS, inputs, generator=draw)
                order = torch.randperm(BLOCK_ROWS, generator=draw)
                alone = x[:1].expand(BLOCK_ROWS, -1).contiguous()
                found = layer(x)
                torch.testing.assert_close(found, F.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-4)
                assert torch.equal(layer(x[order]), found[order])
                assert torch.equal(layer(alone)[-1], found[0])
    finally:
        torch.set_num_threads(before)


class Counting(nn.Module):
    """Sees how many rows it is given at once; ``drift`` makes the bits depend on it."""

    def __init__(self, part: DensePart, drift: float = 0.0) -> None:
        super().__init__()
        self.part, self.drift, self.rows = part, drift, list[int]()

    def forward(self, dense: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        self.rows.append(len(dense))
        return self.part.forward(dense, vectors) + self.drift * (len(dense) > BLOCK_ROWS)


def test_blocks_are_as_large_as_bits_allow() -> None:
    part, batch = DensePart(model_of("DLRM")), batch_of(LARGER_BLOCKS[-1] + LARGER_BLOCKS[0] + 3)
    with scorer_of(part) as scorer:
        expected = np.concatenate([scorer(batch.take(torch.tensor([row]))) for row in range(len(batch))])
    for drift, blocks in ((1e-6, [BLOCK_ROWS] * (len(batch) // BLOCK_ROWS + 1)), (0.0, None)):
        counting = Counting(part, drift)
        with scorer_of(part, counting) as scorer:
            np.testing.assert_array_equal(scorer(batch.take(torch.arange(3))), expected[:3])
            assert counting.rows == [BLOCK_ROWS]
            scorer(batch)
            counting.rows.clear()
            np.testing.assert_array_equal(scorer(batch), expected)
        assert counting.rows == (blocks or counting.rows)
        assert sum(counting.rows) >= len(batch) > sum(counting.rows) - BLOCK_ROWS


class Refusing(nn.Module):
    """Takes numbers of its own only, as a model that looks something up by one of them."""

    def __init__(self, part: DensePart, most: float) -> None:
        super().__init__()
        self.part, self.most = part, most

    def forward(self, dense: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        if float(dense.max()) > self.most:
            raise IndexError("index out of range")
        return self.part.forward(dense, vectors)


def test_blocks_stay_small_where_a_trial_says_nothing() -> None:
    part, batch = DensePart(model_of("DLRM")), batch_of(3 * BLOCK_ROWS)
    assert batch.dense is not None
    with scorer_of(part, Refusing(part, float(batch.dense.max()))) as scorer:
        scorer(batch)
        assert scorer._sizes == [BLOCK_ROWS]
        scorer.replace_dense(part, same_program=True)
        assert scorer._sizes == [BLOCK_ROWS]
        scorer.replace_dense(part)
        assert scorer._sizes is None


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
        scorer_of(part, Sum()) as scorer,
        pytest.raises(BatchError, match=r"logits \[16\] for 16 rows, expected \[rows, labels\]"),
    ):
        scorer(batch_of(3))


def test_a_logit_that_is_not_finite_is_no_score() -> None:
    batch = batch_of(3)
    assert batch.dense is not None
    batch.dense[1] = torch.inf
    with Scorer.of_model(model_of("DLRM"), CPU) as scorer:
        assert np.isnan(scorer(batch)).any(1).tolist() == [False, True, False]
