"""Which backend is picked, and what is said when one cannot run."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hotbed.errors import BackendError
from hotbed.ops import Occurrences, launches, select
from hotbed.ops import backend as module

OPERATIONS = (
    "initial_values_",
    "lookup",
    "gather",
    "weight_gradient",
    "occurrences",
    "group",
    "spread",
    "segment_sum",
    "square_blocks",
    "update",
    "interaction",
    "interaction_backward",
    "cache_find",
    "cache_use",
    "cache_take",
    "cache_read",
    "cache_write",
)


def test_auto_is_numba_on_the_cpu():
    assert select("cpu").NAME == "cpu"
    assert select(torch.device("cpu"), "auto").NAME == "cpu"


def test_an_explicit_name_is_honoured_and_really_runs(backend):
    assert select(backend.device, backend.name) is backend.ops
    before = launches[f"{backend.name}.group"]
    backend.ops.group(backend.put(Occurrences(torch.tensor([1, 1, 0]), torch.tensor([0, 1, 2]), None)))
    assert launches[f"{backend.name}.group"] == before + 1


def test_every_backend_has_every_operation_and_counts_it(backend):
    for operation in OPERATIONS:
        assert callable(getattr(backend.ops, operation))
    before = launches.copy()
    device = backend.device
    ops = backend.ops
    ops.initial_values_(torch.empty(1, 1, device=device), seed=0, rows=range(1), cols=range(1), bound=1.0)
    ops.interaction(torch.ones(1, 2, 1, device=device), 2)
    assert launches - before == {f"{backend.name}.initial_values": 1, f"{backend.name}.interaction": 1}


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        ("cpu", "tritn", "backend: got 'tritn', expected one of auto, reference, cpu, triton; did you mean 'triton'?"),
        ("meta", "auto", "device: got 'meta', expected cpu or cuda"),
        ("cuda", "cpu", "backend 'cpu': got 'cuda' tensors, expected cpu"),
    ],
)
def test_a_wrong_choice_says_what_to_do(device, name, message):
    with pytest.raises(BackendError) as error:
        select(device, name)
    assert str(error.value).startswith(message)


def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    select.cache_clear()
    with pytest.raises(BackendError, match="got cpu tensors, expected cuda"):
        select("cpu", "triton")


def test_triton_missing(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    module._load.cache_clear()
    select.cache_clear()
    try:
        with pytest.raises(BackendError, match="needs the triton package"):
            select("cpu", "triton")
    finally:
        module._load.cache_clear()
