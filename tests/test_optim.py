"""Promise: every sparse optimizer fulfils the published contract; steps, groups, schedules, GradScaler, bad options."""

import pytest
import torch
from torch import nn

from hotbed.errors import OptimizerError, SpecError
from hotbed.jagged import Jagged
from hotbed.optim import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, PartialRowWiseAdam, RowWiseAdagrad, SparseOptimizer
from hotbed.testing.rule_contract import RuleContract
from tests.ops.naive_rules import RULES
from tests.optim_cases import OPTIMIZERS, Tower, batch, loss, state, train

every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)
VARIANTS = [
    *((kind, {}) for kind in OPTIMIZERS),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "max_grad_norm": 0.05}),
    (RowWiseAdagrad, {"weight_decay": 0.1, "weight_decay_mode": "decoupled", "max_norm": 0.3}),
]


class TestContract(RuleContract):
    """Every optimizer there is, and rules and options that are off by default."""

    @pytest.fixture(autouse=True, params=VARIANTS, ids=lambda v: "-".join([v[0].__name__, *v[1]]))
    def _variant(self, request: pytest.FixtureRequest) -> None:
        self.kind, self.options = request.param

    def make(self, model: nn.Module) -> SparseOptimizer:
        return self.kind(model, lr=0.3, **self.options)


def test_the_contract_runs_for_every_rule():
    """Which are found, not listed, so that a new one needs no line here."""
    made = {kind(Tower(), lr=0.3, **options).rule.name for kind, options in VARIANTS}
    assert made == RULES.keys() and len(made) >= 8


@every_optimizer
def test_it_is_a_torch_optimizer_that_reduces_the_loss(kind):
    model = Tower()
    optimizer = kind(model, lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    first = loss(model, batch()).item()
    for _ in range(20):
        loss(model, batch()).backward()
        optimizer.step()
    assert loss(model, batch()).item() < 0.5 * first


def test_coalescing_over_micro_batches_is_exact_not_two_steps():
    model = Tower()
    optimizer = RowWiseAdagrad(model, lr=1.0, eps=1e-12)
    before = model.values().clone()
    ids = Jagged.from_dict({"a": torch.tensor([5]), "b": torch.tensor([5])})
    for _ in range(2):
        model(ids).sum().backward()
    optimizer.step()
    # g = 1 + 1, v = 4, one step of lr · 2 / 2; two separate steps would give 1 + 1/√2.
    torch.testing.assert_close(model.values()[5], before[5] - 1.0)
    assert optimizer.state_dict()["state"][0]["sum_of_squares"][5] == 4.0


def test_step_without_gradients_does_nothing_and_zero_grad_forgets():
    model = Tower()
    optimizer = SGD(model, lr=1.0)
    before = model.values().clone()
    optimizer.step()
    loss(model, batch()).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.values(), before)


def test_step_takes_a_closure():
    model = Tower()
    optimizer = SGD(model, lr=0.1)

    def closure():
        value = loss(model, batch())
        value.backward()
        return value.item()

    before = model.values().clone()
    assert optimizer.step(closure) == pytest.approx(loss(Tower(), batch()).item())
    assert not torch.equal(model.values(), before)


def test_groups_of_tables_have_their_own_options():
    model = Tower()
    optimizer = SGD(model, lr=1.0, groups=[{"tables": ["b"], "lr": 0.0}])
    before = model.embeddings.weight("b").clone()
    loss(model, batch()).backward()
    optimizer.step()
    assert torch.equal(model.embeddings.weight("b"), before)
    assert [g["tables"] for g in optimizer.param_groups] == [["embeddings.b"], ["embeddings.a"]]


def test_equal_table_names_are_told_apart_by_path():
    model = nn.ModuleDict({"left": Tower(), "right": Tower()})
    with pytest.raises(SpecError, match=r"table 'a' is ambiguous: left\.embeddings\.a, right\.embeddings\.a"):
        SGD(model, lr=1.0, groups=[{"tables": ["a"], "lr": 0.0}])
    optimizer = SGD(model, lr=1.0, groups=[{"tables": ["left.embeddings.a"], "lr": 0.0}])
    before = {side: model[side].values().clone() for side in model}
    for side in model:
        loss(model[side], batch()).backward()
    optimizer.step()
    same = {side: (model[side].values() == before[side]).all(1).view(2, 12).all(1).tolist() for side in model}
    assert same == {"left": [True, False], "right": [False, False]}


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (step + 1)),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=9, cycle_momentum=False),
    ],
)
def test_torch_schedules_drive_the_learning_rate(schedule):
    model, by_hand = Tower(), Tower()
    optimizer, plain = SGD(model, lr=0.5), SGD(by_hand, lr=0.5)
    scheduler = schedule(optimizer)
    for step in range(4):
        plain.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        for m, o in ((model, optimizer), (by_hand, plain)):
            loss(m, batch(step)).backward()
            o.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] != 0.5
    assert torch.equal(model.values(), by_hand.values())


def test_a_tensor_learning_rate_works():
    a, b = Tower(), Tower()
    for model, lr in ((a, 0.25), (b, torch.tensor(0.25))):
        optimizer = SGD(model, lr=lr)
        loss(model, batch()).backward()
        optimizer.step()
    assert torch.equal(a.values(), b.values())


@every_optimizer
def test_loading_gives_back_what_was_saved(kind):
    model = Tower()
    optimizer = kind(model, lr=0.1)
    train(model, optimizer, [batch(0), batch(1)])
    saved = state(optimizer)
    other = kind(Tower(), lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    for x, y in zip(state(other), saved, strict=True):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[name], y[name]) and x[name].dtype == y[name].dtype for name in x)
    assert other.param_groups[0]["lr"] == 0.1


def test_a_state_dict_of_other_tables_changes_nothing():
    optimizer = RowWiseAdagrad(Tower(), lr=0.3, initial_accumulator=0.5)
    with pytest.raises(OptimizerError, match="saved optimizer: got groups of tables"):
        optimizer.load_state_dict(RowWiseAdagrad(nn.ModuleDict({"x": Tower(), "y": Tower()}), lr=0.3).state_dict())
    with pytest.raises(OptimizerError, match="saved moments: got"):
        optimizer.load_state_dict(RowWiseAdagrad(Tower(rows=13), lr=0.3).state_dict())
    with pytest.raises(OptimizerError, match="saved moments: got"):
        optimizer.load_state_dict(SGD(Tower(), lr=0.3).state_dict())
    with pytest.raises(OptimizerError, match="saved moments: got"):
        optimizer.load_state_dict(Adam(Tower(), lr=0.3).state_dict())
    assert (optimizer.state_dict()["state"][0]["sum_of_squares"] == 0.5).all()


def test_groups_cannot_be_added_later():
    optimizer = SGD(Tower(), lr=1.0)
    with pytest.raises(OptimizerError, match="every table is in a group already"):
        optimizer.add_param_group({"params": [torch.zeros((), requires_grad=True)]})


# -- torch.amp.GradScaler ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_steps_equal_plain_steps(unscale_first):
    plain, scaled = Tower(), Tower()
    a, b = RowWiseAdagrad(plain, lr=0.3), RowWiseAdagrad(scaled, lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        loss(plain, batch(step)).backward()
        a.step()
        scaler.scale(loss(scaled, batch(step))).backward()
        if unscale_first:
            scaler.unscale_(b)
        scaler.step(b)
        scaler.update()
    assert torch.equal(plain.values(), scaled.values())  # powers of two scale exactly


# -- bad arguments -------------------------------------------------------------------------------------------------


@every_optimizer
def test_there_is_no_default_learning_rate(kind):
    with pytest.raises(TypeError, match="lr"):
        kind(Tower())


TABLES = "embeddings.a, embeddings.b"
BAD_OPTIONS = [
    (SGD, {"lr": -1.0}, f"SGD: lr: got -1.0 for {TABLES}, expected a finite float32 of at least 0"),
    (SGD, {"lr": float("nan")}, "SGD: lr: got nan"),
    (SGD, {"lr": float("inf")}, "SGD: lr: got inf"),
    (SGD, {"lr": torch.tensor(float("nan"))}, r"SGD: lr: got tensor\(nan\)"),
    (SGD, {"lr": "0.1"}, f"SGD: lr: got '0.1' for {TABLES}, expected a number"),
    (SGD, {"lr": 1.0, "weight_decay": None}, f"SGD: weight_decay: got None for {TABLES}, expected a number"),
    (SGD, {"lr": 1.0, "max_norm": "x"}, f"SGD: max_norm: got 'x' for {TABLES}, expected a number"),
    (Adam, {"lr": 1.0, "betas": 0.9}, rf"Adam: betas: got 0.9 for {TABLES}, expected two values in \[0, 1\)"),
    (SGD, {"momentum": -0.5}, "SGD: momentum: got -0.5"),
    (SGD, {"weight_decay": -0.1}, "SGD: weight_decay: got -0.1"),
    (
        SGD,
        {"max_norm": 0.0},
        f"SGD: max_norm: got 0.0 for {TABLES}, expected a positive float32, or None for no limit",
    ),
    (SGD, {"max_grad_norm": -1.0}, "SGD: max_grad_norm: got -1.0"),
    (SGD, {"max_grad_norm": float("nan")}, "SGD: max_grad_norm: got nan"),
    (SGD, {"groups": [{"tables": ["b"], "max_norm": 0}]}, "SGD: max_norm: got 0 for embeddings.b"),
    (Adagrad, {"initial_accumulator": -1.0}, "Adagrad: initial_accumulator: got -1.0"),
    (Adagrad, {"eps": 0.0}, "Adagrad: eps and initial_accumulator: got 0 and 0"),
    (RowWiseAdagrad, {"eps": 0.0}, "RowWiseAdagrad: eps and initial_accumulator: got 0 and 0"),
    (RowWiseAdagrad, {"eps": -1e-8}, "RowWiseAdagrad: eps: got -1e-08"),
    (
        RowWiseAdagrad,
        {"moment_scale": 0.5},
        f"RowWiseAdagrad: moment_scale: got 0.5 for {TABLES}, expected at least 1, or None for the number of replicas",
    ),
    (RowWiseAdagrad, {"moment_scale": "M"}, f"RowWiseAdagrad: moment_scale: got 'M' for {TABLES}, expected a number"),
    (
        RowWiseAdagrad,
        {"delayed_moment": True},
        "RowWiseAdagrad: initial_accumulator: got 0.0 for .*, expected a positive number with delayed_moment",
    ),
    (RowWiseAdagrad, {"weight_decay_mode": "L2"}, "weight_decay_mode: got 'L2', expected 'l2' or 'decoupled'"),
    (Adam, {"betas": (0.9, 1.0)}, r"Adam: betas: got \(0.9, 1.0\) for .*, expected two values in \[0, 1\)"),
    (AdamW, {"betas": (-0.1, 0.9)}, r"AdamW: betas: got \(-0.1, 0.9\)"),
    (LAMB, {"betas": (0.9,)}, r"LAMB: betas: got \(0.9,\)"),
    (
        Adam,
        {"groups": [{"tables": ["a"], "betas": (0.5, 2.0)}]},
        r"Adam: betas: got \(0.5, 2.0\) for embeddings.a, expected",
    ),
    (Adam, {"eps": 0.0}, f"Adam: eps: got 0.0 for {TABLES}, expected a positive float32"),
    (PartialRowWiseAdam, {"eps": 0.0}, "PartialRowWiseAdam: eps: got 0.0"),
    (LAMB, {"weight_decay": float("inf")}, "LAMB: weight_decay: got inf"),
    (FTRL, {"lr": 0.0}, f"FTRL: lr: got 0.0 for {TABLES}, expected a positive float32"),
    (FTRL, {"l1": -1.0}, "FTRL: l1: got -1.0"),
    (SGD, {"groups": [{"tables": ["c"]}]}, "table: got 'c', expected one of embeddings.a, embeddings.b"),
    (SGD, {"groups": [{"lr": 1.0}]}, "expected 'tables' with at least one name"),
    (
        SGD,
        {"groups": [{"tables": ["a"], "lrs": 1}]},
        r"option: got 'lrs', expected .*lr.*; did you mean 'lr'\?",
    ),
    (SGD, {"groups": [{"tables": ["a"], "betas": (0, 0)}]}, "optimizer option: got 'betas', expected one of lr"),
    (SGD, {"groups": [{"tables": ["a"]}, {"tables": ["a"]}]}, "table 'a' is in two optimizer groups"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(kind, options, message):
    with pytest.raises(SpecError, match=message):
        kind(Tower(), **{"lr": 1.0, **options})


def test_a_model_without_tables_is_refused():
    with pytest.raises(SpecError, match=r"got Linear, expected a module with a hotbed\.EmbeddingCollection"):
        SGD(nn.Linear(2, 2), lr=1.0)


def test_options_that_are_changed_are_checked_at_the_next_step():
    model = Tower()
    optimizer = Adam(model, lr=0.1)
    before = [t.clone() for t in model.values()]
    loss(model, batch()).backward()
    optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    with pytest.raises(SpecError, match=r"betas: got \(0.9, 1.0\) .*, expected two values in \[0, 1\) as float32"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.values(), before, strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Adam, {"betas": (0.9, 0.99999999)}, "expected two values in"),
        (Adam, {"eps": 1e-46}, "eps: got 1e-46 .*, expected a positive float32"),
        (Adagrad, {"eps": 1e-46}, "eps and initial_accumulator: got 0 and 0 as float32"),
        (SGD, {"lr": 1e39}, "lr: got 1e[+]39 .*, expected a finite float32"),
    ],
)
def test_options_must_be_right_as_the_float32_of_the_kernels(kind, options, message):
    with pytest.raises(SpecError, match=message):
        kind(Tower(), **{"lr": 0.1, **options})


def test_momentum_from_a_schedule_is_not_ignored():
    model = Tower()
    optimizer = SGD(model, lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)  # cycles momentum unless told not to
    loss(model, batch()).backward()
    with pytest.raises(SpecError, match=r"momentum: got 0\.95"):
        optimizer.step()
