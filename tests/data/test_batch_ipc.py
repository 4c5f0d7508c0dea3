"""A batch arrives as it was sent, and nothing is copied on arrival."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from data_cases import mixed_batch, numbered_batch

from hotbed.batch import Batch
from hotbed.data.batch_ipc import batch_from_buffer, batch_to_buffer
from hotbed.jagged import Jagged
from tests.batches import content

ids = torch.tensor([3, 1, 2], dtype=torch.int32)
ONE_HOT = Jagged.from_dict({"a": ids, "b": ids + 1})
KINDS = {
    "everything": mixed_batch(7),
    "ids only": Batch(sparse=ONE_HOT),
    "ragged without weights": Batch(sparse=Jagged.from_dict({"a": [[1, 2], [], [3]]}), labels=torch.ones(3, 2)),
    "weighted": Batch(sparse=ONE_HOT, weights=torch.tensor([0.5, torch.nan, torch.inf])),
    "empty bags": Batch(sparse=Jagged.from_dict({"a": [[], []], "b": [[], []]})),
    "no sample": mixed_batch(5).take(torch.arange(0)),
    "one sample": mixed_batch(1),
    "strided": Batch(sparse=ONE_HOT, dense=torch.arange(12.0).view(4, 3).T, extra={"x": torch.arange(6)[::2]}),
    "dtypes": Batch(
        sparse=ONE_HOT,
        dense=torch.tensor([[1.0], [2.0], [-0.0]], dtype=torch.bfloat16),
        labels=torch.ones(3, 1, dtype=torch.float64),
        extra={
            "bool": torch.tensor([True, False, True]),
            "int8": torch.tensor([-1, 2, 3], dtype=torch.int8),
            "int16": torch.tensor([[1, -2], [3, 4], [5, 6]], dtype=torch.int16),
            "float16": torch.tensor([0.5, 1.5, torch.nan], dtype=torch.float16),
            "nothing": torch.empty(3, 0),
            "complex64": torch.tensor([1j, 2, 3 - 1j]),
            "a.b ü": torch.arange(3),
            "dense": torch.arange(3),
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_arrives_as_it_was_sent(kind: str) -> None:
    found = batch_from_buffer(bytes(batch_to_buffer(KINDS[kind])))
    assert content(found) == content(KINDS[kind])


def test_what_arrives_is_a_view_of_the_message() -> None:
    message = batch_to_buffer(mixed_batch(100))
    found = batch_from_buffer(message)
    for t in (found.sparse.values, found.sparse.offsets, found.sparse.weights, found.dense, found.labels):
        assert t is not None
        assert message.address <= t.data_ptr() < message.address + message.size


def test_other_tools_read_the_message() -> None:
    """It is Arrow's own format: a list for each tensor."""
    batch = numbered_batch(4)
    table = pa.ipc.open_stream(batch_to_buffer(batch)).read_all()
    assert table.column_names == ["values", "dense", "labels"]
    assert table["values"].to_pylist() == [batch.sparse.values.tolist()]
    assert np.array_equal(table["dense"][0].values.to_numpy(), np.arange(4, dtype=np.float32))
