"""Compile the CPU kernels before the first step, e.g. in a container image: ``hotbed warm-up``."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from hotbed.cli.arguments import Parser, add_json, console, save_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hotbed.plan.schemes import Cut
    from hotbed.specs import RowDtype

ROWS, SAMPLES = 40, 8


def add_arguments(parser: Parser) -> None:
    """Add the file for the results."""
    parser.usage = "hotbed warm-up [--json FILE]"
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Compile the missing kernels, and print their number."""
    from rich.progress import track

    from hotbed.ops.cpu_runtime import kept_forms

    before, start, out = kept_forms(), time.perf_counter(), console()
    for case in track(list(_cases()), "compiling CPU kernels …", console=out, disable=not out.is_terminal):
        case()
    seconds, kept = time.perf_counter() - start, kept_forms()
    found = {"compiled": len(kept) - len(before), "kept": len(kept), "seconds": round(seconds, 1)}
    folder = str(next(iter(kept)).parent)
    new = f"{found['compiled']} of {found['kept']} compiled kernels are new, after {seconds:.0f} s"
    valid = "They work for this processor type and these versions of hotbed and Numba"
    out.print(f"{new}. {valid}: {folder}", soft_wrap=True)
    save_json(parsed.json, {"command": "warm-up", "folder": folder, **found})


def _cases() -> Iterator[Callable[[], object]]:
    """Yield training steps that together call every kernel with every array type."""
    import torch

    import hotbed as hb
    from hotbed.ops.cpu_dense import relu_backward

    # Only layers that are too large to train here call the kernel of ReLU with bfloat16, so call it directly.
    values = torch.ones(SAMPLES, 8, dtype=torch.bfloat16)
    yield partial(relu_backward, values, values)
    for ids in (torch.int64, torch.int32):
        for dtype in (torch.float32, torch.bfloat16):
            yield partial(_dlrm, ids, dtype)
            for rows in ("fp32", "bf16"):
                yield partial(_lookups, ids, dtype, rows, None)
        for cut in (hb.Cut(tier="host", cache_rows=ROWS // 2), hb.Cut(tier="disk")):
            yield partial(_lookups, ids, torch.float32, "fp32", cut)


def _dlrm(ids: torch.dtype, dtype: torch.dtype) -> None:
    """Train a DLRM, which multiplies feature vectors."""
    import torch

    import hotbed as hb

    tables = [hb.Table(f"t{i}", ROWS, 16, init_bound=0.1) for i in range(3)]
    model = hb.nn.DLRM(tables, [hb.Feature(t.name, t.name) for t in tables], 2, bottom=(16,), top=(8, 1), backend="cpu")
    draw = {t.name: torch.randint(0, ROWS, (SAMPLES,), dtype=ids) for t in tables}
    batch = hb.Batch(sparse=hb.Jagged.from_dict(draw), dense=torch.rand(SAMPLES, 2))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(batch)
    optimizer = hb.optim.RowWiseAdagrad(model, lr=0.1)
    logits.float().sum().backward()
    optimizer.step()


def _lookups(ids: torch.dtype, dtype: torch.dtype, rows: RowDtype, cut: Cut | None) -> None:
    """Train tables with bags of one id, of several ids, and of weighted ids, and with one vector per id."""
    import torch

    import hotbed as hb

    tables = [hb.Table(name, ROWS, 20, dtype=rows, init_bound=0.1) for name in ("one", "bags")]
    features = [hb.Feature("one", "one"), hb.Feature("bags", "bags", pooling="mean")]
    features.append(hb.Feature("each", "bags", pooling="none", max_len=3, padding="right"))
    model: nn.Module = hb.EmbeddingCollection(tables, features, backend="cpu")
    if cut is not None:
        model = hb.distribute(model, hb.make_plan(tables, 1, cut))
    offsets = torch.arange(SAMPLES + 1) * 2
    several = torch.randint(0, ROWS, (2 * SAMPLES,), dtype=ids), offsets
    one = torch.randint(0, ROWS, (SAMPLES,), dtype=ids)
    weights = torch.rand(2 * SAMPLES, requires_grad=cut is None)
    optimizer = hb.optim.RowWiseAdagrad(model, lr=0.1)
    for weighted in (None, {"bags": weights}):
        batch = hb.Jagged.from_dict({"one": one, "bags": several, "each": several}, weighted)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = model(batch)
        (found["one"].float().sum() + found["bags"].float().sum() + found["each"].float().sum()).backward()
        optimizer.step()
