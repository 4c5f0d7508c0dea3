"""Send a batch between processes as one Arrow IPC buffer (`batch_to_buffer`), or as a header and bytes (`pack_batch`).

In the Arrow buffer, each tensor is a column with one row: the list of the tensor's elements. The metadata of the Arrow
schema hold plain values such as names, shapes and dtypes, because Arrow lacks some dtypes. Reading copies nothing,
because tensors are views of the buffer.

`pack_batch` is for transfers to device memory. Its header has plain values and stays on the host.
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
ALIGNMENT = 16
"""Alignment of each packed tensor in bytes. Kernels are compiled for this alignment."""


def batch_to_buffer(batch: Batch) -> pa.Buffer:
    """Serialize a batch in CPU memory."""
    tensors = _tensors(batch)
    dtypes_and_shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    header = {"batch": _layout(batch), "tensors": dtypes_and_shapes}
    columns = [_one_list(t) for t in tensors.values()]
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in zip(tensors, columns, strict=True)],
        metadata={_KEY: json.dumps(header)},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.record_batch(columns, schema=schema))
    return sink.getvalue()


def batch_from_buffer(message: Any) -> Batch:
    """Return the batch that `batch_to_buffer` has serialized. The tensors of the batch are views of the buffer."""
    stored = pa.ipc.open_stream(message).read_next_batch()
    header = json.loads(stored.schema.metadata[_KEY])
    tensors: dict[str, Tensor] = {}
    for (name, (dtype, shape)), column in zip(header["tensors"].items(), stored.columns, strict=True):
        tensors[name] = torch.from_dlpack(column.values).view(getattr(torch, dtype)).view(shape)
    return _build_batch(header["batch"], tensors)


def pack_batch(batch: Batch) -> tuple[dict[str, Any], list[tuple[int, Tensor]], int]:
    """Return a header for `unpack_batch`, the batch's tensors with their byte offsets, and the total bytes."""
    offsets: list[tuple[int, Tensor]] = []
    tensors: dict[str, Any] = {}
    end = 0
    for name, t in _tensors(batch).items():
        tensors[name] = [str(t.dtype).removeprefix("torch."), list(t.shape), end]
        offsets.append((end, t))
        end += t.nbytes + -t.nbytes % ALIGNMENT
    verified = sorted(batch.sparse.verified)
    return {"batch": _layout(batch), "tensors": tensors, "verified": verified}, offsets, end


def unpack_batch(header: Mapping[str, Any], content: Tensor) -> Batch:
    """Rebuild a batch from its header and its bytes ``[n]`` uint8, on any device. Tensors are views of the bytes."""
    tensors: dict[str, Tensor] = {}
    for name, (dtype_name, shape, start) in header["tensors"].items():
        dtype: torch.dtype = getattr(torch, dtype_name)
        tensors[name] = content[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    batch = _build_batch(header["batch"], tensors)
    batch.sparse.mark_verified((name, limit) for name, limit in header["verified"])
    return batch


def _layout(batch: Batch) -> dict[str, Any]:
    sparse = batch.sparse
    return {
        "names": sparse.names,
        "fixed": sparse.fixed,
        "size": len(sparse),
        "starts": sparse.starts,
        "slices": batch.slices,
    }


def _build_batch(layout: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    sparse = Jagged(
        layout["names"],
        tensors["values"],
        batch_size=layout["size"],
        fixed=layout["fixed"],
        offsets=tensors.get("offsets"),
        weights=tensors.get("id_weights"),
        starts=tuple(layout["starts"]),
    )
    return Batch(
        sparse=sparse,
        dense=tensors.get("dense"),
        labels=tensors.get("labels"),
        weights=tensors.get("weights"),
        extra={name.removeprefix(_EXTRA): t for name, t in tensors.items() if name.startswith(_EXTRA)},
        slices=None if layout["slices"] is None else tuple(layout["slices"]),
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
