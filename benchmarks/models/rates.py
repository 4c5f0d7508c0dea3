"""Time training steps of DCNv2, DIN and HSTU, of hotbed and of plain PyTorch, and TorchRec's DCNv2, in turns.

Forward, backward and the step of both optimizers, on batches that are in memory. AdaGrad for the tables on all sides
(``torch.optim.Adagrad`` with sparse gradients, FBGEMM's in backward), Adam for the layers. TorchRec's DCNv2 has the
same sizes, and values of its own; ``make bench-peers`` makes an environment that has it. A measurement is the mean of
some steps; sides take turns, and what is shown is the median of their measurements.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from benchmarks.first_contact.planted import zipf
from benchmarks.models.plain import plain, plain_batch

DENSE, LAYERS, LOW_RANK, TOP = 13, 3, 64, (512, 256, 1)
BATCHES = 4
"""Batches that steps go around."""
Step = Callable[[int], None]
"""A training step on the batch of this number."""


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Samples/s of all sides of all models, with each measurement."""
    found: dict[str, Any] = {}
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, for torch warns where nobody says
    for model, make in (("DCNv2", _dcn), ("DIN", _din), ("HSTU", _hstu)):
        sides = make(args)
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for step in sides.values():
            _rate(step, max(1, args.steps // 4), args.batch)
        for _ in track(range(args.rounds), model, console=console, disable=not console.is_terminal):
            for side, step in sides.items():
                taken[side].append(_rate(step, args.steps, args.batch))
        found[model] = {side: {"median": statistics.median(of), "all": of} for side, of in taken.items()}
        console.print(model + ", samples/s: " + ", ".join(f"{s} {f['median']:,.0f}" for s, f in found[model].items()))
    _print(found, console)
    settings = {name: getattr(args, name) for name in ("batch", "rows", "dim", "length", "features", "steps", "rounds")}
    return {"settings": settings | {"threads": torch.get_num_threads()}, "samples/s": found}


def _rate(step: Step, steps: int, batch: int) -> float:
    start = time.perf_counter()
    for number in range(steps):
        step(number % BATCHES)
    return round(batch * steps / (time.perf_counter() - start), 1)


def _print(found: Mapping[str, Any], console: Console) -> None:
    view = Table(*("model", "side", "samples/s", "of hotbed"), title="Training, medians")
    for model, sides in found.items():
        own = sides["hotbed"]["median"]
        for side, of in sides.items():
            view.add_row(model, side, f"{of['median']:,.0f}", f"{of['median'] / own:.2f}")
    console.print(view)


def _trainer(model: nn.Module, tables: torch.optim.Optimizer, batches: Sequence[Any], labels: Tensor) -> Step:
    weights = [p for name, p in model.named_parameters() if ".tables." not in name]
    dense = torch.optim.Adam(weights, lr=1e-3)

    def step(number: int) -> None:
        F.binary_cross_entropy_with_logits(model(batches[number]), labels).backward()
        for optimizer in (dense, tables):
            optimizer.step()
            optimizer.zero_grad()

    return step


def sides_of(make: Callable[[], nn.Module], batches: Sequence[hb.Batch], length: int) -> dict[str, Step]:
    """Steps of hotbed and of plain PyTorch, from the same values."""
    labels = _labels(len(batches[0]))
    own = make()
    other = plain(own)
    rows = [p for name, p in other.named_parameters() if ".tables." in name]
    return {
        "hotbed": _trainer(own, hb.optim.Adagrad(own, lr=0.05), batches, labels),
        "plain PyTorch": _trainer(
            other, torch.optim.Adagrad(rows, lr=0.05), [plain_batch(batch, length) for batch in batches], labels
        ),
    }


def _labels(size: int) -> Tensor:
    return torch.arange(size).remainder(2).float()[:, None]


def _ids(rng: np.random.Generator, rows: int, size: int) -> Tensor:
    return torch.from_numpy(zipf(rng, rows, size))


def _dcn(args: argparse.Namespace) -> dict[str, Step]:
    rng, names = np.random.default_rng(0), [f"t{i}" for i in range(args.features)]
    batches = [
        hb.Batch(
            sparse=hb.Jagged.from_dict({name: _ids(rng, args.rows, args.batch) for name in names}),
            dense=torch.from_numpy(rng.normal(size=(args.batch, DENSE))).float(),
        )
        for _ in range(BATCHES)
    ]

    def make() -> nn.Module:
        tables = [hb.Table(name, args.rows, args.dim) for name in names]
        features = [hb.Feature(name, name) for name in names]
        options = {"layers": LAYERS, "low_rank": LOW_RANK, "bottom": (512, 256, args.dim), "top": TOP}
        return hb.nn.DCNv2(tables, features, DENSE, **options)

    sides = sides_of(make, batches, 1)
    if importlib.util.find_spec("torchrec") is not None:
        sides["TorchRec"] = _torchrec(args, names, batches)
    return sides


def _torchrec(args: argparse.Namespace, names: list[str], batches: Sequence[hb.Batch]) -> Step:
    load: Callable[[str], Any] = importlib.import_module
    theirs, side = load("torchrec"), load("benchmarks.peers.torchrec_side")
    keyed, filters = load("torchrec.optim.keyed"), load("torchrec.optim.optimizers")
    sizes = dict.fromkeys(names, (args.rows, args.dim))
    collection = side.bags(sizes, {n: n for n in names}, 0.05, 1e-10, filters.Adagrad)
    made = load("torchrec.models.dlrm").DLRM_DCN(collection, DENSE, [512, 256, args.dim], [*TOP], LAYERS, LOW_RANK)
    model = side.distributed(made, collection, names, "sparse_arch.embedding_bag_collection", "table")
    rest = dict(filters.in_backward_optimizer_filter(model.named_parameters()))
    dense = keyed.KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    optimizer = keyed.CombinedOptimizer([model.fused_optimizer, dense])
    labels, alike = _labels(args.batch), side.same_every_batch(names, args.batch, 1)
    inputs = [
        theirs.KeyedJaggedTensor(values=torch.cat([batch.sparse[name].values for name in names]), **alike)
        for batch in batches
    ]

    def step(number: int) -> None:
        F.binary_cross_entropy_with_logits(model(batches[number].dense, inputs[number]), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _histories(args: argparse.Namespace) -> tuple[list[hb.Table], list[hb.Feature], list[hb.Batch]]:
    rng, batches = np.random.default_rng(0), list[hb.Batch]()
    for _ in range(BATCHES):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(1, args.length + 1, args.batch))])
        history = _ids(rng, args.rows, int(offsets[-1])), torch.from_numpy(offsets)
        item = _ids(rng, args.rows, args.batch)
        batches.append(hb.Batch(sparse=hb.Jagged.from_dict({"item": item, "history": history})))
    return [hb.Table("item", args.rows, args.dim)], [hb.Feature("item", "item"), hb.Feature("history", "item")], batches


def _din(args: argparse.Namespace) -> dict[str, Step]:
    tables, features, batches = _histories(args)
    options = {"histories": {"history": "item"}, "max_len": args.length}
    return sides_of(lambda: hb.nn.DIN(tables, features, **options), batches, args.length)


def _hstu(args: argparse.Namespace) -> dict[str, Step]:
    tables, features, batches = _histories(args)
    options = {"history": "history", "item": "item", "max_len": args.length}
    return sides_of(lambda: hb.nn.HSTU(tables, features, **options), batches, args.length)
