"""Is the same training the same, bit for bit? Lookup, interaction, its backward and updates, run twice.

The second run shares the device with a stream of matrix products, so programs are scheduled in another order: a sum
whose order depends on the schedule would show.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.workload import DTYPES, UPDATES, Sizes, draw_ids, make_moments, make_rows, make_step, one_hot
from hotbed.ops import select


def digest(tensors: list[Tensor]) -> str:
    """SHA-256 of the bytes of some tensors."""
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train(sizes: Sizes, dim: int, update: str, dtype: str, steps: int, *, disturbed: bool) -> str:
    """Train for some steps from a fixed seed; SHA-256 of every output, gradient and the final state."""
    device = sizes.device
    ops = select(device, "triton")
    tables = tuple(min(rows, 100_000) for rows in sizes.rows)
    batch, n = min(sizes.batch, 8192), len(tables) + 1
    side = torch.cuda.Stream() if disturbed and device.type == "cuda" else None
    noise = torch.randn(2048, 2048, device=device) if side else None
    gen = torch.Generator(device=device).manual_seed(2)
    torch.manual_seed(1)
    rows = make_rows(tables, dim, DTYPES[dtype], device, hot=0.1)
    moments = make_moments(UPDATES[update].rule, sum(tables), dim, device)
    step_of = make_step(UPDATES[update], len(tables), device, lr=0.1, inv_scale=0.5)
    hashes: list[str] = []
    for step in range(steps):
        with torch.cuda.stream(side) if side else nullcontext():
            for _ in range(8 if noise is not None else 0):
                noise = torch.tanh(noise @ noise)  # pyright: ignore[reportOptionalOperand]
        bags = one_hot(tables, batch, draw_ids(tables, batch, "zipf", step, device))
        vectors = torch.empty(batch, n, dim, device=device)
        vectors[:, 0] = torch.randn(batch, dim, generator=gen, device=device)
        ops.lookup(rows, bags, vectors)
        out = ops.interaction(vectors, dim + n * (n - 1) // 2 + 1)
        grad = ops.interaction_backward(torch.tanh(out), vectors)
        found = ops.occurrences(bags)
        ops.update(step_of, rows, moments, found, ops.group(found), grad.view(-1, dim))
        hashes.append(digest([out, grad[:, 0]]))
    hashes.append(digest([rows.wide, rows.narrow, rows.exponents, *moments.values()]))
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def main(out: Path) -> None:
    sizes = Sizes.choose()
    results: list[dict[str, object]] = []
    steps = 2 if sizes.tiny else 20
    for dim, (update, dtype) in product(sizes.dims, (("rowwise_adagrad_limited", "fp32"), ("adamw", "int8"))):
        first, second = (train(sizes, dim, update, dtype, steps, disturbed=disturbed) for disturbed in (False, True))
        about = {"dim": dim, "update": update, "dtype": dtype, "steps": steps}
        results.append({**about, "sha256": [first, second], "equal": first == second})
        verdict = "equal" if first == second else "DIFFERENT"
        print(f"  D = {dim}, {update}, {dtype}: {steps} steps, {first[:16]} and {second[:16]}: {verdict}", flush=True)
        out.write_text(json.dumps(results, indent=1))
    if not all(r["equal"] for r in results):
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
