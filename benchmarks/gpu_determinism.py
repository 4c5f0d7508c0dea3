"""Check that the same training is the same, bit for bit: lookup, interaction, its backward and updates, run twice.

The second run shares the device with a stream of matrix products, so programs are scheduled in another order: a sum
whose order depends on the schedule would show.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu import OPTIMIZERS, ZIPF, Sizes
from benchmarks.kernels.ops import filled_store, rule_step
from benchmarks.kernels.options import OpsOptions
from benchmarks.kernels.workload import Workload


def digest(tensors: list[Tensor]) -> str:
    """SHA-256 of the bytes of some tensors."""
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train(sizes: Sizes, dim: int, update: str, dtype: str, steps: int, *, disturbed: bool) -> str:
    """Train for some steps from a fixed seed; SHA-256 of every output, gradient and the final state."""
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
    """Train under all conditions, whatever time is left; 1 if any two runs differ."""
    sizes = Sizes.choose()
    results: list[dict[str, object]] = []
    steps = 2 if sizes.tiny else 20
    for dim, (update, dtype) in product(sizes.dims, (("rowwise_adagrad_limited", "fp32"), ("adamw", "int8"))):
        about = {"dim": dim, "update": update, "dtype": dtype, "steps": steps}
        try:
            first, second = (train(sizes, dim, update, dtype, steps, disturbed=after) for after in (False, True))
        except Exception as error:  # the rest goes on
            traceback.print_exc()
            results.append({**about, "error": f"{type(error).__name__}: {error}", "equal": False})
            out.write_text(json.dumps(results, indent=1))
            continue
        results.append({**about, "sha256": [first, second], "equal": first == second})
        verdict = "equal" if first == second else "DIFFERENT"
        print(f"  D = {dim}, {update}, {dtype}: {steps} steps, {first[:16]} and {second[:16]}: {verdict}", flush=True)
        out.write_text(json.dumps(results, indent=1))
    return int(not all(r["equal"] for r in results))
