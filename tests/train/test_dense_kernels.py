"""Kernels of models that predictions of GPU steps count; `tests/census` holds those of DLRM against a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hotbed as hb
from hotbed.plan.workload import Kernel
from hotbed.train.runs.dense_kernels import arena_launches, dense_kernels

TABLES = [hb.Table(f"t{i}", rows=100, dim=16) for i in range(3)]
FEATURES = [hb.Feature(f"f{i}", table=t.name) for i, t in enumerate(TABLES)]


def kernels(model: type[nn.Module], narrow: bool = True, casts_once: bool = True, **options: Any) -> list[Kernel]:
    with torch.device("meta"):
        made = model(TABLES, FEATURES, **options)
    return list(dense_kernels(made, narrow=narrow, dense_inputs=13, labels=1, casts_once=casts_once))


def test_a_further_layer_is_six_kernels_and_eleven_passes_over_its_outputs() -> None:
    """Written by its product, read and written by ReLU, read by the next product; its gradient written, read and
    written by ReLU's kernel, which reads the output, too, and sums it; read by two products; its output is read for the
    next weight's gradient."""
    short, long = (kernels(hb.nn.DLRM, bottom=(16,), top=(64,) * n + (1,)) for n in (2, 3))
    assert len(long) - len(short) == 6
    more = sum(k.sample_bytes for k in long) - sum(k.sample_bytes for k in short)
    assert more == 11 * 2 * 64


def test_float32_moves_twice_the_bytes_and_casts_nothing() -> None:
    narrow, wide = (kernels(hb.nn.DLRM, narrow=n, bottom=(16,), top=(32, 1)) for n in (True, False))
    assert [k.op for k in wide if k.op in ("_to_copy", "_foreach_copy_")] == []
    (one,), (two,) = ([k for k in ks if k.op == "_interaction_kernel"] for ks in (narrow, wide))
    assert two.sample_bytes == 2 * one.sample_bytes and two.flops == one.flops


def test_ranks_cast_weights_one_by_one() -> None:
    alone, many = (kernels(hb.nn.DLRM, casts_once=n, bottom=(16,), top=(32, 1)) for n in (True, False))
    assert len(many) - len(alone) == 3 * 2 * 2 - 2
    assert sum(k.step_bytes for k in many) == sum(k.step_bytes for k in alone)


@pytest.mark.parametrize(
    ("model", "options", "ops"),
    [
        (hb.nn.DLRM, {"bottom": (16,), "top": (32, 1), "dropout": 0.5}, {"native_dropout", "native_dropout_backward"}),
        (hb.nn.DCNv2, {"layers": 2, "low_rank": 4, "top": (32, 1)}, {"add", "cat", "mm"}),
        (hb.nn.WideDeep, {"top": (32, 1)}, {"cat", "addmm", "relu_", "_relu_backward_kernel"}),
    ],
)
def test_other_models_have_their_operations(model: type[nn.Module], options: dict[str, Any], ops: set[str]) -> None:
    found = kernels(model, **options)
    assert ops <= {k.op for k in found}
    assert all(k.flops >= 0 and k.sample_bytes >= 0 and k.step_bytes >= 0 for k in found)


def test_slower_memories_and_more_ranks_take_more_launches() -> None:
    alone, many = arena_launches(), arena_launches(8)
    assert alone["device"] < alone["host"] == alone["disk"] < arena_launches(cached=True)["host"]
    assert all(many[tier] > alone[tier] for tier in alone)
