"""Is the same training the same, bit for bit? Lookup, interaction, its backward and updates, run twice.

The second run shares the device with a stream of matrix products, so programs are scheduled in another order: a sum
whose order depends on the schedule would show.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.workload import Sizes, bases_of, draw_ids, one_hot
from hotbed.ops import RuleStep, select
from hotbed.optim import RowWiseAdagrad


def digest(tensors: list[Tensor]) -> str:
    """SHA-256 of the bytes of some tensors."""
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train(sizes: Sizes, dim: int, steps: int, *, disturbed: bool) -> str:
    """Train for some steps from a fixed seed; SHA-256 of every output, gradient and the final state."""
    device = sizes.device
    ops = select(device, "triton")
    tables = tuple(min(rows, 100_000) for rows in sizes.rows)
    batch = min(sizes.batch, 8192)
    side = torch.cuda.Stream() if disturbed and device.type == "cuda" else None
    noise = torch.randn(2048, 2048, device=device) if side else None
    weight = torch.empty(sum(tables), dim, device=device)
    ops.initial_values_(weight, seed=1, rows=range(len(weight)), cols=range(dim), bound=0.1)
    moments = {"sum_of_squares": torch.zeros(len(weight), device=device)}
    hyper = torch.tensor([[1.0, 0.1, 1e-8]], device=device).repeat(len(tables), 1)
    inv_scale, gate = torch.tensor(0.5, device=device), torch.tensor(True, device=device)
    gen = torch.Generator(device=device).manual_seed(2)
    hashes: list[str] = []
    for step in range(steps):
        with torch.cuda.stream(side) if side else nullcontext():
            for _ in range(8 if noise is not None else 0):
                noise = torch.tanh(noise @ noise)  # pyright: ignore[reportOptionalOperand]
        bags = one_hot(tables, batch, draw_ids(tables, batch, "zipf", step, device))
        embeddings = ops.lookup(weight, bags)
        dense = torch.randn(batch, dim, generator=gen, device=device)
        n = len(tables) + 1
        out = ops.interaction(dense, embeddings, dim + n * (n - 1) // 2 + 1)
        grad_dense, grad_embeddings = ops.interaction_backward(torch.tanh(out), dense, embeddings)
        found = ops.occurrences(bags)
        step_of = RuleStep(rule=RowWiseAdagrad.rule, bases=bases_of(bags), hyper=hyper, inv_scale=inv_scale, gate=gate)
        ops.update(step_of, weight, moments, found, ops.group(found.slots), grad_embeddings.view(-1, dim))
        hashes.append(digest([out, grad_dense]))
    hashes.append(digest([weight, *moments.values()]))
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def main(out: Path) -> None:
    sizes = Sizes.choose()
    results: list[dict[str, object]] = []
    for dim in sizes.dims:
        steps = 2 if sizes.tiny else 20
        first, second = (train(sizes, dim, steps, disturbed=disturbed) for disturbed in (False, True))
        results.append({"dim": dim, "steps": steps, "sha256": [first, second], "equal": first == second})
        print(
            f"  D = {dim}: {steps} steps, {first[:16]} and {second[:16]}: {'equal' if first == second else 'DIFFERENT'}"
        )
        out.write_text(json.dumps(results, indent=1))
    if not all(r["equal"] for r in results):
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
