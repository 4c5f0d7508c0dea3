"""The formula of every rule for one row, in numpy; and which rules there are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hotbed.optim import Rule, SparseOptimizer

from .cases import naive_block_sum

Row = np.ndarray
State = dict[str, Any]
"""By name, the moments of a row (arrays of its columns, or float32 numbers), or hyperparameters (float32)."""


def optimizers() -> list[type[SparseOptimizer]]:
    """Every optimizer of hotbed that can be made, however deep it is derived."""
    found, ahead = [], [SparseOptimizer]
    while ahead:
        ahead += (cls := ahead.pop()).__subclasses__()
        if cls.__module__.startswith("hotbed.") and not cls.__name__.endswith(("Base", "Optimizer")):
            found.append(cls)
    return sorted(found, key=lambda cls: cls.__name__)


def _rules() -> dict[str, Rule]:
    """Those of the optimizers' classes, and any other in their modules: an optimizer may choose between several."""
    spaces = [vars(space) for cls in optimizers() for space in (cls, sys.modules[cls.__module__])]
    rules = [value for space in spaces for value in space.values() if isinstance(value, Rule)]
    return {rule.name: rule for rule in sorted(rules, key=lambda rule: rule.name)}


RULES = _rules()


def mean_square(g: Row) -> np.float32:
    return naive_block_sum(g * g) / np.float32(len(g))


def norm(x: Row) -> np.float32:
    return np.sqrt(naive_block_sum(x * x))


def sgd(w: Row, state: State, g: Row, h: State) -> Row:
    return w - h["lr"] * g


def momentum(w: Row, state: State, g: Row, h: State) -> Row:
    state["momentum_buffer"] = h["momentum"] * state["momentum_buffer"] + g
    return w - h["lr"] * state["momentum_buffer"]


def adagrad(w: Row, state: State, g: Row, h: State) -> Row:
    state["sum_of_squares"] = state["sum_of_squares"] + g * g
    return w - h["lr"] * g / (np.sqrt(state["sum_of_squares"]) + h["eps"])


def rowwise_adagrad(w: Row, state: State, g: Row, h: State) -> Row:
    before = state["sum_of_squares"]
    state["sum_of_squares"] = before + mean_square(g)
    v = before if h["delayed"] else state["sum_of_squares"]
    return w - h["lr"] / (np.sqrt(v / h["moment_scale"] + h["eps_inside"]) + h["eps"]) * g


def _adam_ratio(state: State, g: Row, h: State, square: Row | np.float32) -> Row:
    one = np.float32(1)
    state["exp_avg"] = h["beta1"] * state["exp_avg"] + (one - h["beta1"]) * g
    state["exp_avg_sq"] = h["beta2"] * state["exp_avg_sq"] + (one - h["beta2"]) * square
    m, v = state["exp_avg"] / h["1 - beta1^t"], state["exp_avg_sq"] / h["1 - beta2^t"]
    return m / (np.sqrt(v) + h["eps"])


def adam(w: Row, state: State, g: Row, h: State) -> Row:
    return w - h["lr"] * _adam_ratio(state, g, h, g * g)


def partial_rowwise_adam(w: Row, state: State, g: Row, h: State) -> Row:
    return w - h["lr"] * _adam_ratio(state, g, h, mean_square(g))


def lamb(w: Row, state: State, g: Row, h: State) -> Row:
    r = _adam_ratio(state, g, h, g * g) + h["weight_decay"] * w
    trust = norm(w) / norm(r) if norm(w) > 0 and norm(r) > 0 else np.float32(1)
    return w - h["lr"] * trust * r


def ftrl(w: Row, state: State, g: Row, h: State) -> Row:
    n = state["n"] + g * g
    z = state["z"] + (g - (np.sqrt(n) - np.sqrt(state["n"])) / h["lr"] * w)
    state["n"], state["z"] = n, z
    solved = (np.sign(z) * h["l1"] - z) / ((h["beta"] + np.sqrt(n)) / h["lr"] + h["l2"])
    return np.where(np.abs(z) <= h["l1"], np.float32(0), solved)


NAIVE: dict[str, Callable[[Row, State, Row, State], Row]] = {
    f.__name__: f for f in (adagrad, adam, ftrl, lamb, momentum, partial_rowwise_adam, rowwise_adagrad, sgd)
}


def step_of_row(rule: str, w: Row, state: State, g: Row, common: State, own: State) -> Row:
    """What a step does to a row: clip, decay, the rule, clip; ``state`` is updated in place."""
    g = g * (common["max_grad_norm"] / norm(g)) if norm(g) > common["max_grad_norm"] else g
    if common["l2"] != 0:
        g = g + common["l2"] * w
    if common["decay"] != 0:
        w = w - common["decay"] * w
    w = NAIVE[rule](w, state, g, {"lr": common["lr"], **own})
    return w * (common["max_norm"] / norm(w)) if norm(w) > common["max_norm"] else w
