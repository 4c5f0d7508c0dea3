"""Every backend knows the rules of all optimizers, and no others."""

from __future__ import annotations

import importlib
import sys

import pytest

from hotbed.optim import SGD, Moment, Rule
from hotbed.optim.rules import COMMON

from .naive_rules import NAIVE, RULES, optimizers

KNOWN_RULES = {
    "reference": ("hotbed.ops.reference_rules", "_RULES"),
    "cpu": ("hotbed.ops.cpu_rules", "RULES"),
    "triton": ("hotbed.ops.triton_rules", "RULES"),
}


def test_optimizers_and_rules_are_found():
    """Whoever adds an optimizer finds everything that enumerates them, by this list."""
    names = ["FTRL", "LAMB", "SGD", "Adagrad", "Adam", "AdamW", "PartialRowWiseAdam", "RowWiseAdagrad"]
    assert sorted(cls.__name__ for cls in optimizers()) == sorted(names)
    rules = ["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb", "ftrl"]
    assert sorted(RULES) == sorted(rules)
    assert NAIVE.keys() == RULES.keys()
    assert {cls.rule.name for cls in optimizers() if cls is not SGD} <= RULES.keys()


@pytest.mark.parametrize("name", KNOWN_RULES)
def test_a_backend_knows_exactly_these_rules(name):
    if name == "triton":
        pytest.importorskip("triton")
    module, attribute = KNOWN_RULES[name]
    known = getattr(importlib.import_module(module), attribute)
    assert set(known) == set(RULES)
    assert module in sys.modules


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules_are_such_as_kernels_take(rule: Rule):
    assert len(rule.moments) <= 2 and all(isinstance(m, Moment) for m in rule.moments)
    assert set(rule.corrected) <= set(rule.hyper)
    assert len({m.name for m in rule.moments}) == len(rule.moments)


def test_common_hyperparameters_come_in_a_fixed_order():
    assert COMMON == ("lr", "max_grad_norm", "max_norm", "l2", "decay")
