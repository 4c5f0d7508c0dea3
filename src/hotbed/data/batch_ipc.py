"""Carry a batch between processes as one Arrow IPC message (`batch_to_buffer`), or as a header and bytes (`packed`).

The message has a column for each tensor, with one row, a list of all its elements. Its metadata say shapes, dtypes that
Arrow lacks, names, and what else is to travel with it. Reading copies nothing: tensors are views of the message.

`packed` bytes may travel, and be read, in the memory of a device; the header, which is plain, stays on the host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.jagged import Jagged

_KEY = b"hotbed"
_EXTRA = "extra."
_OF_ARROW = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.float16, torch.float32, torch.float64}
)


def batch_to_buffer(batch: Batch | None, about: Mapping[str, Any] | None = None) -> pa.Buffer:
    """Write a batch in CPU memory, or none, and plain values beside it."""
    tensors = {} if batch is None else _tensors(batch)
    header: dict[str, Any] = {"about": dict(about or {}), "batch": None}
    if batch is not None:
        header["batch"] = _described(batch)
    header["tensors"] = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    columns = [_one_list(t) for t in tensors.values()]
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in zip(tensors, columns, strict=True)],
        metadata={_KEY: json.dumps(header)},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.record_batch(columns, schema=schema))
    return sink.getvalue()


def batch_from_buffer(message: Any) -> tuple[Batch | None, dict[str, Any]]:
    """Read what `batch_to_buffer` wrote, of anything that has its bytes; the batch is a view of them."""
    stored = pa.ipc.open_stream(message).read_next_batch()
    header = json.loads(stored.schema.metadata[_KEY])
    tensors: dict[str, Tensor] = {}
    for (name, (dtype, shape)), column in zip(header["tensors"].items(), stored.columns, strict=True):
        tensors[name] = torch.from_dlpack(column.values).view(getattr(torch, dtype)).view(shape)
    about = header["batch"]
    return None if about is None else _batch_of(about, tensors), header["about"]


ALIGNMENT = 16
"""Each tensor of `packed` bytes begins at a multiple of it, for which kernels are compiled."""


def packed(batch: Batch) -> tuple[dict[str, Any], list[tuple[int, Tensor]], int]:
    """Return a batch as a header, and its tensors with where each begins among so many bytes; see `unpacked`."""
    places: list[tuple[int, Tensor]] = []
    described: dict[str, Any] = {}
    end = 0
    for name, t in _tensors(batch).items():
        described[name] = [str(t.dtype).removeprefix("torch."), list(t.shape), end]
        places.append((end, t))
        end += t.nbytes + -t.nbytes % ALIGNMENT
    verified = sorted(batch.sparse.verified)
    return {"batch": _described(batch), "tensors": described, "verified": verified}, places, end


def unpacked(header: Mapping[str, Any], content: Tensor) -> Batch:
    """Return the batch whose header this is, as views of its bytes ``[n]`` uint8, on whatever device they are."""
    tensors: dict[str, Tensor] = {}
    for name, (kind, shape, start) in header["tensors"].items():
        dtype: torch.dtype = getattr(torch, kind)
        tensors[name] = content[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    batch = _batch_of(header["batch"], tensors)
    batch.sparse.mark_verified((name, limit) for name, limit in header["verified"])
    return batch


def _described(batch: Batch) -> dict[str, Any]:
    """What a batch is beside its tensors."""
    sparse = batch.sparse
    return {"names": sparse.names, "fixed": sparse.fixed, "size": len(sparse), "starts": sparse.starts}


def _batch_of(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    sparse = Jagged(
        about["names"],
        tensors["values"],
        batch_size=about["size"],
        fixed=about["fixed"],
        offsets=tensors.get("offsets"),
        weights=tensors.get("id_weights"),
        starts=tuple(about["starts"]),
    )
    return Batch(
        sparse=sparse,
        dense=tensors.get("dense"),
        labels=tensors.get("labels"),
        weights=tensors.get("weights"),
        extra={name.removeprefix(_EXTRA): t for name, t in tensors.items() if name.startswith(_EXTRA)},
    )


def _tensors(batch: Batch) -> dict[str, Tensor]:
    sparse = batch.sparse
    found = {"values": sparse.values, "offsets": sparse.offsets, "id_weights": sparse.weights}
    found |= {"dense": batch.dense, "labels": batch.labels, "weights": batch.weights}
    found |= {f"{_EXTRA}{name}": column for name, column in batch.extra.items()}
    return {name: t for name, t in found.items() if t is not None}


def _one_list(t: Tensor) -> pa.LargeListArray:
    flat = t.contiguous().view(-1)
    elements = pa.array((flat if flat.dtype in _OF_ARROW else flat.view(torch.uint8)).numpy())
    return pa.LargeListArray.from_arrays(np.array([0, len(elements)], np.int64), elements)
