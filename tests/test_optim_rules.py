"""Promise: each optimizer does to a table what its formula and its dense counterpart say; its options are obeyed."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hotbed.optim import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, PartialRowWiseAdam, RowWiseAdagrad, SparseOptimizer
from tests.ops.naive_rules import step_of_row
from tests.optim_cases import DIM, OPTIMIZERS, ROWS, Jagged, Tower, batch, loss, state, train

every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)
EVERY_ROW = torch.arange(ROWS).repeat(2)


class Dense(nn.Module):
    """The same model with dense parameters."""

    def __init__(self) -> None:
        super().__init__()
        tower = Tower().embeddings
        self.tables = nn.ParameterDict({name: tower.weight(name).clone() for name in "ab"})

    def forward(self, ids: Jagged) -> torch.Tensor:
        return torch.cat([self.tables[n][ids[n].values] for n in "ab"], dim=1)

    def values(self) -> torch.Tensor:
        return torch.cat([self.tables["a"], self.tables["b"]]).detach()


def whole_batch(seed: int) -> Jagged:
    """Every row of both tables occurs, in random company."""
    draw = torch.Generator().manual_seed(seed)
    return Jagged.from_dict({n: EVERY_ROW[torch.randperm(2 * ROWS, generator=draw)] for n in "ab"})


COUNTERPARTS = {
    "sgd": (SGD, {"weight_decay": 0.1}, torch.optim.SGD, {}),
    "momentum": (SGD, {"momentum": 0.9, "weight_decay": 0.01}, torch.optim.SGD, {}),
    "adagrad": (Adagrad, {"weight_decay": 0.1}, torch.optim.Adagrad, {}),
    "adagrad_accumulator": (
        Adagrad,
        {"initial_accumulator": 0.3},
        torch.optim.Adagrad,
        {"initial_accumulator_value": 0.3},
    ),
    "adam": (Adam, {}, torch.optim.Adam, {}),
    "adam_options": (Adam, {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}, torch.optim.Adam, {}),
    "adamw": (AdamW, {}, torch.optim.AdamW, {}),
    "adamw_options": (AdamW, {"betas": (0.5, 0.9), "weight_decay": 0.3}, torch.optim.AdamW, {}),
}


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_equal_to_the_dense_optimizer_where_every_step_touches_every_row(name):
    kind, options, dense_kind, renamed = COUNTERPARTS[name]
    model, dense = Tower(), Dense()
    same = {key: value for key, value in options.items() if key != "initial_accumulator"}
    batches = [whole_batch(i) for i in range(10)]
    train(model, kind(model, lr=0.1, **options), batches)
    train(dense, dense_kind(dense.parameters(), lr=0.1, **same, **renamed), batches)
    assert not torch.equal(dense.values(), Dense().values())
    torch.testing.assert_close(model.values(), dense.values(), rtol=1e-5, atol=5e-6)


OFF = {"lr": 0.1, "max_grad_norm": math.inf, "max_norm": math.inf, "l2": 0.0, "decay": 0.0}
BETAS = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4}
ADAM = {"betas": (0.8, 0.95), "eps": 1e-4}


@dataclass(frozen=True)
class Formula:
    """Options of an optimizer, and what they are in the formula of its rule."""

    kind: type[SparseOptimizer]
    options: dict[str, Any]
    rule: str
    common: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    initial: dict[str, float] = field(default_factory=dict)


EPS = {"eps": 0.01}
ROWWISE = {**EPS, "eps_inside": 0.0, "moment_scale": 1.0, "delayed": 0.0}
FTRL_OPTIONS = {"beta": 0.5, "l1": 0.02, "l2": 0.3}
LIMITS = {"max_grad_norm": 0.05, "max_norm": 0.3}
DECAY = {"weight_decay": 0.2}
L2, DECOUPLED = {"l2": 0.2}, {"decay": 0.02}  # lr is 0.1
FORMULAS = {
    "sgd": Formula(SGD, DECAY, "sgd", L2),
    "momentum": Formula(SGD, {"momentum": 0.8}, "momentum", own={"momentum": 0.8}),
    "adagrad": Formula(
        Adagrad,
        {**EPS, **DECAY, "initial_accumulator": 0.1},
        "adagrad",
        L2,
        EPS,
        {"sum_of_squares": 0.1},
    ),
    "rowwise": Formula(RowWiseAdagrad, {**EPS, **DECAY}, "rowwise_adagrad", L2, ROWWISE),
    "rowwise_decoupled": Formula(
        RowWiseAdagrad, {**EPS, **DECAY, "weight_decay_mode": "decoupled"}, "rowwise_adagrad", DECOUPLED, ROWWISE
    ),
    "rowwise_scaled": Formula(
        RowWiseAdagrad,
        {**EPS, "eps_inside": True, "moment_scale": 3},
        "rowwise_adagrad",
        own={"eps": 0.0, "eps_inside": 0.01, "moment_scale": 3.0, "delayed": 0.0},
    ),
    "rowwise_delayed": Formula(
        RowWiseAdagrad,
        {**EPS, "delayed_moment": True, "initial_accumulator": 0.1},
        "rowwise_adagrad",
        own={**ROWWISE, "delayed": 1.0},
        initial={"sum_of_squares": 0.1},
    ),
    "adam": Formula(Adam, {**ADAM, **DECAY}, "adam", L2, BETAS),
    "adamw": Formula(AdamW, {**ADAM, **DECAY}, "adam", DECOUPLED, BETAS),
    "partial": Formula(PartialRowWiseAdam, {**ADAM, **DECAY}, "partial_rowwise_adam", DECOUPLED, BETAS),
    "lamb": Formula(LAMB, {**ADAM, **DECAY}, "lamb", own={**BETAS, **DECAY}),
    "ftrl": Formula(FTRL, {**FTRL_OPTIONS, "initial_accumulator": 0.1}, "ftrl", own=FTRL_OPTIONS, initial={"n": 0.1}),
    "clipped": Formula(Adam, {**ADAM, **LIMITS}, "adam", LIMITS, BETAS),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_rows_follow_the_formula_in_the_steps_that_touch_them_and_no_others(name):
    """Lazy: neither a row nor its moments change in other steps, though t goes on."""
    formula = FORMULAS[name]
    model, dense = Tower(), Dense()
    optimizer = formula.kind(model, lr=0.1, **formula.options)
    common = {key: np.float32(value) for key, value in {**OFF, **formula.common}.items()}
    own = {key: np.float32(value) for key, value in formula.own.items()}
    values = dense.values().numpy().copy()
    moments = {
        m.name: np.full((2 * ROWS, DIM) if m.per == "element" else 2 * ROWS, formula.initial.get(m.name, 0), np.float32)
        for m in optimizer.rule.moments
    }
    for step in range(6):
        ids = batch(step, size=5)
        with torch.no_grad():
            for n, part in zip("ab", np.split(values, 2), strict=True):
                dense.tables[n].copy_(torch.from_numpy(part))
        dense.zero_grad()
        loss(dense, ids).backward()
        grad = np.concatenate([dense.tables[n].grad.numpy() for n in "ab"])
        corrections = {
            f"1 - {b}^t": np.float32(1 - float(own[b]) ** (step + 1)) for b in ("beta1", "beta2") if b in own
        }
        for row in sorted({*ids["a"].values.tolist(), *(ids["b"].values + ROWS).tolist()}):
            of_row = {key: moment[row] for key, moment in moments.items()}
            values[row] = step_of_row(formula.rule, values[row], of_row, grad[row], common, {**own, **corrections})
            for key, moment in of_row.items():
                moments[key][row] = moment
        train(model, optimizer, [ids])
        torch.testing.assert_close(model.values(), torch.from_numpy(values), rtol=1e-4, atol=5e-6)
    for key, moment in moments.items():
        found = torch.cat([of_table[key] for of_table in state(optimizer)])
        torch.testing.assert_close(found, torch.from_numpy(moment), rtol=1e-4, atol=5e-6)


def test_every_optimizer_has_a_formula():
    assert {formula.kind for formula in FORMULAS.values()} == set(OPTIMIZERS)


# -- options -------------------------------------------------------------------------------------------------------

GROUP_OPTIONS = [
    (SGD, {"momentum": 0.5, "weight_decay": 0.1}),
    (SGD, {"max_norm": 0.2, "max_grad_norm": 0.1}),
    (Adagrad, {"eps": 0.1, "initial_accumulator": 0.5}),
    (RowWiseAdagrad, {"lr": 0.01, "weight_decay": 0.1}),
    (Adam, {"betas": (0.5, 0.6), "eps": 0.01}),
    (AdamW, {"betas": (0.0, 0.5), "weight_decay": 0.5}),
    (PartialRowWiseAdam, {"betas": (0.7, 0.9)}),
    (LAMB, {"weight_decay": 0.3, "eps": 0.1}),
    (FTRL, {"l1": 0.1, "beta": 0.2}),
]


@pytest.mark.parametrize(("kind", "options"), GROUP_OPTIONS)
def test_a_group_trains_its_tables_as_an_optimizer_with_these_options_would(kind, options):
    """And leaves the bits of the other tables as they are without it."""
    models = grouped, plain, chosen = Tower(), Tower(), Tower()
    optimizers = [
        kind(grouped, lr=0.1, groups=[{"tables": ["b"], **options}]),
        kind(plain, lr=0.1),
        kind(chosen, **{"lr": 0.1, **options}),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, [batch(i) for i in range(5)])
    assert torch.equal(grouped.embeddings.weight("a"), plain.embeddings.weight("a"))
    assert torch.equal(grouped.embeddings.weight("b"), chosen.embeddings.weight("b"))
    assert not torch.equal(grouped.embeddings.weight("b"), plain.embeddings.weight("b"))


def test_options_of_groups_can_change_between_steps():
    model, fresh = Tower(), Tower()
    optimizer, wanted = Adam(model, lr=0.1), Adam(fresh, lr=0.02, betas=(0.5, 0.6))
    optimizer.param_groups[0].update(lr=0.02, betas=(0.5, 0.6))
    for each, its in ((model, optimizer), (fresh, wanted)):
        train(each, its, [batch(i) for i in range(3)])
    assert torch.equal(model.values(), fresh.values())


@every_optimizer
def test_max_norm_bounds_every_touched_row(kind):
    if kind is FTRL:
        with pytest.raises(TypeError, match="max_norm"):
            kind(Tower(), lr=0.1, max_norm=0.05)
        return
    model = Tower()
    before = model.values().clone()
    ids = batch(rows=4)
    train(model, kind(model, lr=0.1, max_norm=0.05), [ids])
    touched = torch.cat([ids["a"].values, ids["b"].values + ROWS]).unique()
    norms = model.values()[touched].norm(dim=1)
    assert (norms <= 0.05 * (1 + 1e-6)).all() and (before[touched].norm(dim=1) > 0.05).any()
    assert (model.values().norm(dim=1) > 0.05).any(), "others may be longer"


def test_max_grad_norm_bounds_the_step_of_a_row():
    """Of the summed gradient, after unscaling: the norm of an SGD step is at most lr · max_grad_norm."""
    model, scaled = Tower(), Tower()
    before = model.values().clone()
    train(model, SGD(model, lr=1.0, max_grad_norm=0.01), [whole_batch(0)])
    norms = (model.values() - before).norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, 0.01), rtol=1e-4, atol=1e-6)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**10), SGD(scaled, lr=1.0, max_grad_norm=0.01)
    scaler.scale(loss(scaled, whole_batch(0))).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(scaled.values(), model.values(), rtol=0, atol=1e-6)


def test_without_momentum_nothing_is_kept():
    model = Tower()
    bytes_before = model.embeddings.nbytes
    optimizer = SGD(model, lr=0.1, momentum=0.0)
    train(model, optimizer, [batch()])
    assert model.embeddings.nbytes == bytes_before
    assert all(set(of_table) == {"step"} for of_table in state(optimizer))


def test_momentum_in_one_group_keeps_it_for_all_and_changes_no_bit_of_the_others():
    model, plain = Tower(), Tower()
    optimizer = SGD(model, lr=0.1, groups=[{"tables": ["a"], "momentum": 0.9}])
    train(model, optimizer, [batch(i) for i in range(4)])
    train(plain, SGD(plain, lr=0.1), [batch(i) for i in range(4)])
    assert all("momentum_buffer" in of_table for of_table in state(optimizer))
    assert torch.equal(model.embeddings.weight("b"), plain.embeddings.weight("b"))
    assert not torch.equal(model.embeddings.weight("a"), plain.embeddings.weight("a"))


def test_ftrl_makes_weights_exactly_zero():
    model = Tower()
    train(model, FTRL(model, lr=0.1, l1=100.0), [whole_batch(0)])
    assert not model.values().any()


def test_ftrl_leaves_rows_alone_while_a_schedule_is_at_zero():
    """The formula divides by lr."""
    model = Tower()
    optimizer = FTRL(model, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= 2))
    for step in range(4):
        before, kept = model.values().clone(), state(optimizer)
        train(model, optimizer, [batch(step)])
        moved = step >= 2
        assert torch.equal(model.values(), before) != moved
        for x, y in zip(state(optimizer), kept, strict=True):
            assert all(torch.equal(x[name], y[name]) != moved for name in x)
        schedule.step()
    assert model.values().isfinite().all()
