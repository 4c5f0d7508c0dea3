"""Time models before and after they move in: ``python -m benchmarks.moving_in [--json FILE] [--page PAGE]``.

Each project is a DLRM of 26 tables with one id per feature: *plain*, a loop of PyTorch with ``nn.EmbeddingBag``; the
same in *lightning* and *accelerate*; and *torchrec*, TorchRec's own ``DLRM`` under ``DistributedModelParallel`` with
row-wise AdaGrad in backward. *after* is the same with `hotbed.swap_embeddings`, or with `hotbed.compat.torchrec`.
*dense* has gradients of whole tables, *sparse* has ``nn.EmbeddingBag(sparse=True)``. Both start with equal values, and
take turns in one process. The largest difference of their losses is reported. Projects whose library is not installed
keep their figures in FILE: ``make bench-peers`` makes an environment with TorchRec, ``make setup`` one with Lightning.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import hotbed as hb
from benchmarks import runner
from hotbed.files import write_json

BEGIN, END = "<!-- moving_in: begin -->", "<!-- moving_in: end -->"
LR = 0.1
NUMERICALS = 13
Data = tuple[Tensor, Tensor, Tensor]
"""Numericals ``[B, 13]``, ids ``[B, F]``, labels ``[B]``."""
Step = Callable[[Data], tuple[float, float]]
"""Trains on a batch, and returns its loss and seconds."""


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--page", type=Path, help="Markdown page with markers around the table.")
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = runner.read_json(args.json).get("results", {})
    for name, (needs, make) in PROJECTS.items():
        if needs is not None and importlib.util.find_spec(needs) is None:
            print(f"{name} is left out: {needs} is not installed")
        else:
            results[name] = {"measured on": runner.measured_on(), **measure(make, args)}
    heads = ("project", "before", "after", "before ÷ after", "losses differ by")
    rows: list[dict[str, object]] = []
    for name, result in results.items():
        before, after = (statistics.median(result[side]) for side in ("before", "after"))
        cells = (name, f"{before:.1f} ms", f"{after:.1f} ms", f"{before / after:.2f}", f"{result['difference']:.1e}")
        rows.append(dict(zip(heads, cells, strict=True)))
    runner.show("moving in", rows)
    if args.page:
        lines = ["; ".join(dict.fromkeys(result["measured on"] for result in results.values())), ""]
        cells = (heads, ["---"] * len(heads), *(row.values() for row in rows))
        runner.put_between(
            args.page, BEGIN, END, "\n".join([*lines, *(f"| {' | '.join(map(str, c))} |" for c in cells)])
        )
    if args.json:
        sizes = {k: v for k, v in vars(args).items() if k not in ("json", "page")}
        write_json(args.json, {"measured": runner.about(**sizes), "results": results})


def measure(make: Callable[[argparse.Namespace, bool], Step], args: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of the steps of both sides, and the largest difference of their losses."""
    sides = {"before": make(args, False), "after": make(args, True)}
    found: dict[str, list[float]] = {side: [] for side in sides}
    difference = 0.0
    for turn in range(args.rounds + 2):
        data = batch(args, turn)
        losses: list[float] = []
        for side, step in sides.items():
            loss, seconds = step(data)
            losses.append(loss)
            if turn > 1:  # the first ones compile
                found[side].append(seconds * 1000)
        difference = max(difference, abs(losses[0] - losses[1]))
    return {**found, "difference": difference}


def batch(args: argparse.Namespace, seed: int) -> Data:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, args.rows, (args.samples, args.tables), generator=g)
    return torch.rand(args.samples, NUMERICALS, generator=g), ids, torch.rand(args.samples, generator=g).round()


class Net(nn.Module):
    """A DLRM as people write it, with a module per table."""

    def __init__(self, tables: int, rows: int, dim: int, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse) for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(NUMERICALS, 128), nn.ReLU(), nn.Linear(128, dim), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 256), nn.ReLU(), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(ids[:, i : i + 1]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


def plain(args: argparse.Namespace, after: bool, *, sparse: bool) -> Step:
    model: nn.Module = Net(args.tables, args.rows, args.dim, sparse)
    optimizers: list[torch.optim.Optimizer] = []
    if after:
        model = hb.swap_embeddings(model)
        optimizers.append(hb.optim.SGD(model, lr=LR))
    optimizers.append(torch.optim.SGD(model.parameters(), lr=LR))

    def step(data: Data) -> float:
        dense, ids, labels = data
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(dense, ids), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return timed(step)


def accelerated(args: argparse.Namespace, after: bool) -> Step:
    """Make the loop with Accelerate. The tables' optimizer steps in backward, so the loop stays as it was."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: nn.Module = Net(args.tables, args.rows, args.dim, True)
    if after:
        model = hb.swap_embeddings(model)
        hb.optim.SGD(model, lr=LR).in_backward()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))

    def step(data: Data) -> float:
        dense, ids, labels = data
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(dense, ids), labels)
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    return timed(step)


def lightning(args: argparse.Namespace, after: bool) -> Step:
    """Make a module of Lightning with automatic optimization. A step is a fit of one batch."""
    from lightning import LightningModule, Trainer

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module = Net(args.tables, args.rows, args.dim, True)
            if after:
                self.net = hb.swap_embeddings(self.net)
                self.of_tables = hb.optim.SGD(self.net, lr=LR).in_backward()
            self.loss, self.start, self.seconds = torch.zeros(()), 0.0, 0.0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=LR)

        def training_step(self, data: Data, number: int) -> Tensor:
            dense, ids, labels = data
            loss = binary_cross_entropy_with_logits(self.net(dense, ids), labels)
            self.loss = loss.detach()
            return loss

        def on_train_batch_start(self, *_: Any) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds = time.perf_counter() - self.start

    module = Lit()
    features = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(features, False)

    def step(data: Data) -> tuple[float, float]:
        loader = DataLoader([0], collate_fn=lambda _: data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Trainer(accelerator="cpu", max_steps=1, **quiet).fit(module, loader)
        return float(module.loss), module.seconds

    return step


def torchrec(args: argparse.Namespace, after: bool) -> Step:
    """Make TorchRec's own DLRM, or the same with hotbed's classes."""
    import torch.distributed as dist

    from hotbed.compat import torchrec as ours

    their: Callable[[str], Any] = importlib.import_module
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    names = [f"t{i}" for i in range(args.tables)]

    def model(of: Any) -> tuple[nn.Module, Any]:
        configs = [
            of.EmbeddingBagConfig(num_embeddings=args.rows, embedding_dim=args.dim, name=n, feature_names=[n])
            for n in names
        ]
        collection = of.EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
        torch.manual_seed(0)
        return their("torchrec.models.dlrm").DLRM(collection, NUMERICALS, [128, args.dim], [256, 1]), collection

    if after:
        made, collection = model(ours)
        with torch.no_grad():
            for i, name in enumerate(names):
                collection.rows.set_weight(name, values_of(i, args))
        ours.apply_optimizer_in_backward(ours.RowWiseAdagrad, collection.parameters(), {"lr": LR})
        parallel: Any = ours.DistributedModelParallel(made)
        dense = dict(ours.in_backward_optimizer_filter(parallel.named_parameters()))
        keyed = ours.KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, lr=LR))
        optimizer: Any = ours.CombinedOptimizer([parallel.fused_optimizer, keyed])
        batch_of: Any = ours.KeyedJaggedTensor
    else:
        theirs, keyed = their("torchrec"), their("torchrec.optim.keyed")
        distributed = their("benchmarks.peers.torchrec_side").distributed
        made, collection = model(theirs)
        in_backward = their("torchrec.optim.apply_optimizer_in_backward").apply_optimizer_in_backward
        in_backward(their("torchrec.optim.rowwise_adagrad").RowWiseAdagrad, collection.parameters(), {"lr": LR})
        path = "sparse_arch.embedding_bag_collection"
        parallel = distributed(made, collection, names, path, "table")  # by default small tables are replicated
        state = parallel.state_dict()
        for i, name in enumerate(names):
            state[f"{path}.embedding_bags.{name}.weight"].local_shards()[0].tensor.copy_(values_of(i, args))
        rest = their("torchrec.optim.optimizers").in_backward_optimizer_filter
        of_rest = keyed.KeyedOptimizerWrapper(
            dict(rest(parallel.named_parameters())), lambda p: torch.optim.SGD(p, lr=LR)
        )
        optimizer = keyed.CombinedOptimizer([parallel.fused_optimizer, of_rest])
        batch_of = theirs.KeyedJaggedTensor

    def step(data: Data) -> float:
        numericals, ids, labels = data
        lengths = torch.ones(args.samples * args.tables, dtype=torch.int32)
        keyed = batch_of.from_lengths_sync(names, ids.T.reshape(-1), lengths)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(parallel(numericals, keyed).squeeze(1), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return timed(step)


def timed(train: Callable[[Data], float]) -> Step:
    def step(data: Data) -> tuple[float, float]:
        start = time.perf_counter()
        return train(data), time.perf_counter() - start

    return step


def values_of(table: int, args: argparse.Namespace) -> Tensor:
    return torch.empty(args.rows, args.dim).uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(table))


PROJECTS: dict[str, tuple[str | None, Callable[[argparse.Namespace, bool], Step]]] = {
    "plain, sparse": (None, lambda args, after: plain(args, after, sparse=True)),
    "plain, dense": (None, lambda args, after: plain(args, after, sparse=False)),
    "accelerate": ("accelerate", accelerated),
    "lightning": ("lightning", lightning),
    "torchrec": ("torchrec", torchrec),
}
"""The library that each project needs, and the function that makes a side."""

if __name__ == "__main__":
    main()
