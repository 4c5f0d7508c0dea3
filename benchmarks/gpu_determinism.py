"""Check that lookup, interaction, backward and updates return equal bits when they run twice.

The second run shares the device with a stream of matrix products, so programs are scheduled in another order. If the
order of a sum depended on the schedule, its bits would differ.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import OPTIMIZERS, ZIPF, Record, Sizes
from benchmarks.kernels.ops import filled_store, rule_step
from benchmarks.kernels.options import OpsOptions
from benchmarks.kernels.workload import Workload


def digest(tensors: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train(sizes: Sizes, dim: int, update: str, dtype: str, steps: int, *, disturbed: bool) -> str:
    """Train from a fixed seed, and return the SHA-256 of all outputs, gradients and the final state."""
    device = sizes.device
    rows = [min(r, 100_000) for r in sizes.rows]
    options = sizes.options(
        OpsOptions, dim, rows=rows, batch_size=min(sizes.batch, 4096), dtype=dtype, fp32_rows=max(rows) // 10
    )
    batch, n = options.batch_size, len(rows) + 1
    side = torch.cuda.Stream() if disturbed and device.type == "cuda" else None
    noise = torch.randn(2048, 2048, device=device) if side else None
    gen = torch.Generator(device=device).manual_seed(2)
    rule = replace(
        rule_step(options, device, partial(OPTIMIZERS[update], lr=0.1)), inv_scale=torch.tensor(0.5, device=device)
    )
    store, workload = filled_store(options, rule, device), Workload(options)
    for seed, (first, count) in enumerate(zip(workload.first_slots, rows, strict=True)):
        store.initialize(first, seed=seed, rows=range(count), cols=range(dim), bound=0.1)
    out = store.empty((batch, n - 1, dim), torch.float32)
    hashes: list[str] = []
    for _ in range(steps):
        with torch.cuda.stream(side) if side else nullcontext():
            for _ in range(8 if noise is not None else 0):
                noise = torch.tanh(noise @ noise)  # pyright: ignore[reportOptionalOperand]
        bags = workload.layout(workload.draw(ZIPF)[0].to(device))
        store.lookup(bags, out)
        vectors = torch.cat([torch.randn(batch, 1, dim, generator=gen, device=device), out], 1)
        pairs = store.ops.interaction(vectors, dim + n * (n - 1) // 2 + 1)
        grad = store.ops.interaction_backward(torch.tanh(pairs), vectors)
        found = store.occurrences(bags)
        of_rows = grad[:, 1:].reshape(-1, dim)
        store.ops.update(rule, store.rows, store.moments, found, store.ops.group(found), of_rows)
        hashes.append(digest([pairs, grad]))
    hashes.append(digest([store.rows.wide, store.rows.narrow, store.rows.exponents, *store.moments.values()]))
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def main(out: Path, budget_s: float) -> int:
    """Train twice under all conditions. The status is 1 if two runs differ."""
    sizes = Sizes.choose()
    record = Record(sizes, out, budget_s)
    steps = 2 if sizes.tiny else 20

    def twice(dim: int, update: str, dtype: str) -> dict[str, Any]:
        first, second = (train(sizes, dim, update, dtype, steps, disturbed=after) for after in (False, True))
        return {"sha256": [first, second], "equal": first == second}

    for dim, (update, dtype) in product(sizes.dims, (("rowwise_adagrad_limited", "fp32"), ("adamw", "int8"))):
        about = {"dim": dim, "update": update, "dtype": dtype, "steps": steps}
        record.attempt(about, lambda dim=dim, update=update, dtype=dtype: twice(dim, update, dtype))
    return int(not all(r.get("equal") for r in record.results))
