"""Promise: every backend has a kernel of each rule of hotbed, and no others; a rule without one is refused clearly."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import Tensor

from hotbed.embed import EmbeddingCollection
from hotbed.errors import BackendError, SpecError
from hotbed.jagged import Jagged
from hotbed.ops.reference import sums_rows
from hotbed.optim import SGD, Moment, Rule, SparseOptimizer
from hotbed.optim.rule import COMMON
from hotbed.specs import Feature, Table

from .naive_rules import NAIVE, RULES, optimizers

KNOWN_RULES = {
    "cpu": ("hotbed.ops.cpu_rules", "RULES"),
    "triton": ("hotbed.ops.triton_rules", "RULES"),
}


def test_optimizers_and_rules_are_found():
    """By their classes and modules, so that a new one joins all matrices; its formula in NumPy is the row to add."""
    assert SGD in optimizers() and len(optimizers()) >= 8
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


def test_rules_that_sum_over_columns_are_those_whose_formula_yields():
    summing = {name for name, rule in RULES.items() if sums_rows(rule, ())}
    assert summing == {"rowwise_adagrad", "partial_rowwise_adam", "lamb"}
    assert sums_rows(RULES["sgd"], {"max_norm"}) and not sums_rows(RULES["sgd"], {"l2", "decay"})


def formula(w: Tensor, moments: object, g: Tensor, h: dict[str, Tensor], dim: int) -> Tensor:
    return w - h["lr"] * g.sign()


ONE, TWO, THREE = (Moment(name, "row") for name in ("a", "b", "c"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moments": (ONE, TWO, THREE)}, r"rule 'own': got moments \['a', 'b', 'c'\], expected at most 2"),
        ({"moments": (ONE, ONE)}, r"got moments \['a', 'a'\], expected at most 2 of different names"),
        ({"corrected": ("beta",), "hyper": ("eps",)}, r"corrects: got 'beta', expected one of eps"),
    ],
)
def test_rules_that_no_kernel_could_take_are_refused(options: dict, message: str):
    with pytest.raises(SpecError, match=message):
        Rule("own", formula, **options)


def test_a_name_stands_for_one_formula():
    """Or a kernel would run that is another rule's."""
    with pytest.raises(
        SpecError,
        match=r"rule 'adam': got the formula .*formula, but a rule of this name has hotbed\.optim\.adam\._adam",
    ):
        Rule("adam", formula)
    assert Rule("own", formula) == Rule("own", formula)


class SignDescent(SparseOptimizer):
    """Of someone else's: a formula, and no kernel."""

    rule = Rule("sign_of_tests", formula)


@pytest.mark.parametrize("of", ["cpu", "triton"])
def test_a_backend_without_a_kernel_of_a_rule_says_what_to_do(of: str):
    if of == "triton":
        pytest.importorskip("triton")
    device = "cuda" if of == "triton" and torch.cuda.is_available() else "cpu"
    ids = Jagged.from_dict({"a": torch.tensor([3])}).to(device)
    for name, runs in ((of, False), ("reference", True)):
        tables, features = [Table("a", rows=5, dim=4)], [Feature("a", table="a")]
        model = EmbeddingCollection(tables, features, device=device, backend=name)
        before = model.weight("a").clone()
        optimizer = SignDescent(model, {"lr": 0.5})
        (model(ids).stack().sum() * 3).backward()
        if runs:
            optimizer.step()
            assert torch.equal(model.weight("a")[3], before[3] - 0.5)
            continue
        with pytest.raises(
            BackendError,
            match=f"backend '{of}': got the rule 'sign_of_tests', expected one with a kernel: sgd, ",
        ):
            optimizer.step()
        assert torch.equal(model.weight("a"), before)


def test_common_hyperparameters_come_in_a_fixed_order():
    assert COMMON == ("lr", "max_grad_norm", "max_norm", "l2", "decay")
