"""The workload of the GPU suite: the 26 tables of Criteo 1TB (15.6 GiB at 128 float32 columns), one id per sample."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hotbed.ops import BagLayout, Rows, RuleStep
from hotbed.ops.layout import SCALE_BLOCK
from hotbed.optim import COMMON, FTRL, LAMB, Adagrad, Adam, AdamW, PartialRowWiseAdam, RowWiseAdagrad, Rule
from hotbed.optim.sgd import MOMENTUM, PLAIN

ROWS = (
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209, 10667, 104, 4, 968, 15),
    *(8165896, 2675940, 7156453, 302516, 12022, 97, 35),
)
"""Rows per table with values seen fewer than 15 times dropped (NVIDIA's DLRM for Criteo 1TB)."""

ZIPF = 1.05


class Update(NamedTuple):
    """A rule, and those of `hotbed.optim.COMMON` that are switched on."""

    rule: Rule
    limits: Mapping[str, float] = {}


UPDATES = {
    "sgd": Update(PLAIN),
    "rowwise_adagrad": Update(RowWiseAdagrad.rule),
    "adam": Update(Adam.rule),
    "adamw": Update(AdamW.rule, {"decay": 1e-6}),
    "momentum": Update(MOMENTUM),
    "adagrad": Update(Adagrad.rule),
    "partial_rowwise_adam": Update(PartialRowWiseAdam.rule, {"decay": 1e-6}),
    "lamb": Update(LAMB.rule),
    "ftrl": Update(FTRL.rule),
    "rowwise_adagrad_limited": Update(RowWiseAdagrad.rule, {"max_grad_norm": 1.0, "max_norm": 10.0, "l2": 1e-6}),
}
"""Every optimizer; the rarest last, because they are what is left out where time runs out."""
OWN = {
    "eps": 1e-8,
    "moment_scale": 1.0,
    "momentum": 0.9,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "beta": 1.0,
}
"""Hyperparameters of the rules; others are 0."""

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}

INCOMPLETE = 3
"""Exit status of a part that had no time for everything."""

Distribution = Literal["uniform", "zipf"]


@dataclass(frozen=True)
class Sizes:
    """How much is done: everything on a GPU, next to nothing under Triton's interpreter."""

    tiny: bool
    device: torch.device
    batch: int
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    repeats: int
    copy_bytes: int

    @staticmethod
    def choose() -> Sizes:
        """Full size on a CUDA device; tiny without one, or where ``HOTBED_TINY=1`` asks for it."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda" if cuda else "cpu")
        if not cuda or os.environ.get("HOTBED_TINY") == "1":
            return Sizes(True, device, 4, (3, 40, 11), (16,), 1, 1 << 16)
        return Sizes(False, device, 65536, ROWS, (16, 128), 21, 4 << 30)

    def tables(self, dim: int) -> tuple[int, ...]:
        """Rows per table, shrunk in proportion where they and two moments would take over 70 % of the free memory."""
        if self.device.type == "cpu":
            return self.rows
        free, _ = torch.cuda.mem_get_info()
        share = min(1.0, 0.7 * free / (sum(self.rows) * dim * 12))
        return tuple(max(int(r * share), 1) for r in self.rows)


def make_rows(tables: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device, hot: float = 0.0) -> Rows:
    """An arena of small random values; this share of each table, its most frequent rows, is float32."""
    wide = [rows if dtype == torch.float32 else int(rows * hot) for rows in tables]
    slots, first_wide = [0, *accumulate(tables)], [0, *accumulate(wide)]
    narrow = torch.empty(sum(tables) - sum(wide), dim, dtype=dtype, device=device)
    narrow.view(torch.uint8).random_(0, 56)  # what these bytes mean is finite in every dtype
    blocks = -(-dim // SCALE_BLOCK) if dtype == torch.int8 else 0
    places = [[s, w, at, s - at, 0, 1, 0] for s, w, at in zip(slots[:-1], wide, first_wide[:-1], strict=True)]
    return Rows(
        wide=torch.empty(sum(wide), dim, device=device).uniform_(-0.1, 0.1),
        narrow=narrow,
        exponents=torch.full((len(narrow), blocks), -8, dtype=torch.int8, device=device),
        tables=torch.tensor(places, device=device),
    )


def row_bytes(rows: Rows) -> float:
    """Bytes of a row, exponents included; the mean over all rows."""
    tensors = (rows.wide, rows.narrow, rows.exponents)
    return sum(t.numel() * t.element_size() for t in tensors) / (len(rows.wide) + len(rows.narrow))


def draw_ids(tables: tuple[int, ...], batch: int, kind: Distribution, seed: int, device: torch.device) -> Tensor:
    """One id per table and sample, feature-major ``[F · B]`` int32; row 0 of a table is its most frequent."""
    gen = torch.Generator(device=device).manual_seed(seed)
    columns: list[Tensor] = []
    for rows in tables:
        u = torch.rand(batch, generator=gen, device=device, dtype=torch.float64)
        if kind == "uniform":
            ids = (u * rows).long()
        else:
            mass = torch.arange(1, rows + 1, device=device, dtype=torch.float64).pow_(-ZIPF).cumsum_(0)
            ids = torch.searchsorted(mass, u * mass[-1])
        columns.append(ids.clamp_(max=rows - 1).int())
    return torch.cat(columns)


def one_hot(tables: tuple[int, ...], batch: int, ids: Tensor) -> BagLayout:
    """Bags of `draw_ids`: one feature per table, all tables in one arena, room for the dense vector before them."""
    first = [0, *accumulate(tables)]
    rows = [[f * batch, 1, 0, first[f], 0, f, f] for f in range(len(tables))]
    return BagLayout(
        ids,
        torch.tensor(rows, device=ids.device),
        torch.empty(0, batch + 1, dtype=torch.int64, device=ids.device),
        None,
        batch,
        len(ids),
        False,
        width=len(tables) + 1,
        room=1,
    )


def make_step(
    update: Update, tables: int, device: torch.device, *, lr: float = 1e-4, inv_scale: float = 1.0
) -> RuleStep:
    """A step with equal hyperparameters for all tables."""
    rule = update.rule
    common = {"lr": lr, "max_grad_norm": torch.inf, "max_norm": torch.inf, "l2": 0.0, "decay": 0.0, **update.limits}
    own = [OWN.get(name, 0.0) for name in rule.hyper]
    line = [1.0, *(common[name] for name in COMMON), *own, *(1 - OWN[name] for name in rule.corrected)]
    return RuleStep(
        rule=rule,
        hyper=torch.tensor([line] * tables, device=device),
        seeds=torch.arange(tables, device=device),
        uses=frozenset(update.limits),
        inv_scale=torch.tensor(inv_scale, device=device),
        gate=torch.tensor(True, device=device),
    )


def make_moments(rule: Rule, slots: int, dim: int, device: torch.device) -> dict[str, Tensor]:
    """Moments of a rule for all rows, zero."""
    return {m.name: torch.zeros((slots, dim) if m.per == "element" else slots, device=device) for m in rule.moments}
