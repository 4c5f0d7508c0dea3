"""Whole DLRM steps: hotbed against the same model in plain PyTorch, alternating in one run.

Both sides have the shapes of the DLRM that NVIDIA published (13-512-256-128, 26 tables, 1024-1024-512-256-1), the same
initial values, the same Zipf-distributed ids, and SGD everywhere, so that the work is the same. Plain PyTorch uses
``nn.EmbeddingBag(sparse=True)`` and ``torch.optim.SGD``, its fastest way to train tables on a CPU.

    python benchmarks/plain_pytorch.py --json benchmarks/results/plain_pytorch_cpu.json

Figures are medians over the alternations of (plain seconds ÷ hotbed seconds); more than 1 means hotbed is faster.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb


def zipf_ids(rng: np.random.Generator, tables: int, rows: int, batch: int, exponent: float) -> Tensor:
    """Ids ``[tables · batch]``; ranks are scattered over the table, as hashed vocabularies are."""
    weights = np.arange(1, rows + 1) ** -exponent
    cumulative = np.cumsum(weights) / weights.sum()
    ranks = np.searchsorted(cumulative, rng.random(tables * batch)).clip(max=rows - 1)
    return torch.from_numpy(np.random.default_rng(0).permutation(rows)[ranks])


class PlainDLRM(nn.Module):
    def __init__(self, model: hb.nn.DLRM) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                model.embeddings.weight(name).clone(), freeze=False, mode="sum", sparse=True
            )
            for name in model.embeddings.tables
        )
        self.bottom, self.top = nn.Sequential(*model.bottom), nn.Sequential(*model.top)
        self.width = model.interaction.width
        self.register_buffer("pairs", torch.tril_indices(len(self.bags) + 1, len(self.bags) + 1, -1))

    def forward(self, batch: hb.Batch) -> Tensor:
        size = len(batch)
        hidden = self.bottom(batch.dense)
        vectors = [bag(batch.sparse.values[i * size : (i + 1) * size].view(-1, 1)) for i, bag in enumerate(self.bags)]
        stacked = torch.stack([hidden, *vectors], 1)
        gram = torch.bmm(stacked, stacked.mT)
        flat = gram[:, self.pairs[0], self.pairs[1]]
        return self.top(F.pad(torch.cat([hidden, flat], 1), (0, self.width - hidden.shape[1] - flat.shape[1])))


def seconds(model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: hb.Batch, bf16: bool) -> float:
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(batch)
    loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return time.perf_counter() - start


def embedding_seconds(embed, optimizer: torch.optim.Optimizer, batch: hb.Batch, grad: Tensor) -> float:
    """Lookup of all tables, backward from a given gradient, update."""
    start = time.perf_counter()
    vectors = embed(batch)
    optimizer.zero_grad()
    vectors.backward(grad)
    optimizer.step()
    return time.perf_counter() - start


def compare(a, b, rounds: int) -> dict[str, float]:
    """Alternate two timed calls; `ratio` is b ÷ a pair by pair."""
    pairs = [(a(i), b(i)) for i in range(rounds + 2)][2:]
    ratios = [second / first for first, second in pairs]
    return {
        "hotbed_s": statistics.median(p[0] for p in pairs),
        "plain_s": statistics.median(p[1] for p in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=4096)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    torch.manual_seed(0)
    names = [f"t{i}" for i in range(args.tables)]
    model = hb.nn.DLRM(
        [hb.Table(n, rows=args.rows, dim=args.dim) for n in names],
        [hb.Feature(n, table=n) for n in names],
        bottom=(512, 256, args.dim),
    )
    plain = PlainDLRM(model)
    rng = np.random.default_rng(1)
    batches = [
        hb.Batch(
            sparse=hb.Jagged(
                names, zipf_ids(rng, len(names), args.rows, args.batch_size, args.zipf), batch_size=args.batch_size
            ),
            dense=torch.randn(args.batch_size, 13),
            labels=torch.randint(0, 2, (args.batch_size, 1)).float(),
        )
        for _ in range(4)
    ]
    sparse = hb.optim.SGD(model, lr=0.01)
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    plain_sparse = torch.optim.SGD(plain.bags.parameters(), lr=0.01)
    grad = torch.randn(args.batch_size, len(names), args.dim) * 1e-3

    def plain_embed(batch: hb.Batch) -> Tensor:
        size = len(batch)
        ids = batch.sparse.values
        return torch.stack([bag(ids[i * size : (i + 1) * size].view(-1, 1)) for i, bag in enumerate(plain.bags)], 1)

    results: dict[str, object] = {
        "embedding": compare(
            lambda i: embedding_seconds(lambda b: model.embeddings(b.sparse).stack(), sparse, batches[i % 4], grad),
            lambda i: embedding_seconds(plain_embed, plain_sparse, batches[i % 4], grad),
            args.rounds,
        )
    }
    for precision in ("fp32", "bf16"):
        bf16 = precision == "bf16"
        results[f"step_{precision}"] = compare(
            lambda i, bf16=bf16: seconds(model, [dense, sparse], batches[i % 4], bf16),
            lambda i, bf16=bf16: seconds(plain, [dense, plain_sparse], batches[i % 4], bf16),
            args.rounds,
        )
    results["settings"] = {k: v for k, v in vars(args).items() if k != "json"}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    results["environment"] = {
        "cpu": cpu or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }
    for name in ("embedding", "step_fp32", "step_bf16"):
        r = results[name]
        print(
            f"{name:10s} hotbed {r['hotbed_s'] * 1e3:7.1f} ms · plain {r['plain_s'] * 1e3:7.1f} ms · "
            f"ratio {r['ratio']:.2f} ({r['ratio_min']:.2f}–{r['ratio_max']:.2f})"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
