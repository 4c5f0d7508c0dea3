import pytest
import torch
from torch import nn

from hotbed.embed import EmbeddingCollection
from hotbed.errors import OptimizerError, SpecError
from hotbed.jagged import Jagged
from hotbed.optim import SGD, RowWiseAdagrad, SparseOptimizer
from hotbed.specs import Feature, Table

RULES = sorted(SparseOptimizer.__subclasses__(), key=lambda c: c.__name__)


class Tower(nn.Module):
    """One table and a head, so that models can hold several collections with equal table names."""

    def __init__(self, rows: int = 12) -> None:
        super().__init__()
        tables = [Table("a", rows=rows, dim=4), Table("b", rows=rows, dim=4)]
        self.embeddings = EmbeddingCollection(tables, [Feature("a", table="a"), Feature("b", table="b")])

    def forward(self, batch: Jagged) -> torch.Tensor:
        return self.embeddings(batch).concatenate()

    def values(self) -> torch.Tensor:
        return torch.cat([self.embeddings.weight("a"), self.embeddings.weight("b")])


def batch(seed: int = 0, size: int = 16) -> Jagged:
    draw = torch.Generator().manual_seed(seed)
    return Jagged.from_dict({n: torch.randint(0, 12, (size,), generator=draw) for n in "ab"})


def loss(model: Tower, ids: Jagged) -> torch.Tensor:
    return (model(ids) - torch.linspace(-1, 1, 8)).square().sum(1).mean()


def test_all_rules_are_enumerated():
    assert [r.__name__ for r in RULES] == ["RowWiseAdagrad", "SGD"]


@pytest.mark.parametrize("rule", RULES)
def test_it_is_a_torch_optimizer_that_reduces_the_loss(rule):
    model = Tower()
    optimizer = rule(model, lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    first = loss(model, batch()).item()
    for _ in range(20):
        loss(model, batch()).backward()
        optimizer.step()
    assert loss(model, batch()).item() < 0.5 * first


@pytest.mark.parametrize("rule", RULES)
def test_accumulated_micro_batches_equal_one_batch(rule):
    whole, parts = Tower(), Tower()
    one, many = rule(whole, lr=0.3), rule(parts, lr=0.3)
    for step in range(3):
        ids = batch(step)
        loss(whole, ids).backward()
        one.step()
        for half in (slice(0, 8), slice(8, 16)):
            (loss(parts, ids.take(torch.arange(16)[half])) / 2).backward()
        many.step()
    torch.testing.assert_close(whole.values(), parts.values())


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


@pytest.mark.parametrize("rule", RULES)
def test_state_dict_resumes_to_the_bit(rule):
    def train(model, optimizer, steps):
        for step in steps:
            loss(model, batch(step)).backward()
            optimizer.step()

    straight = Tower()
    train(straight, rule(straight, lr=0.3), range(6))
    first, second = Tower(), Tower()
    before = rule(first, lr=0.3)
    train(first, before, range(3))
    saved = {k: v.clone() for k, v in first.state_dict().items()}, before.state_dict()
    second.load_state_dict(saved[0])
    after = rule(second, lr=9.0)
    after.load_state_dict(saved[1])
    train(second, after, range(3, 6))
    assert torch.equal(second.values(), straight.values())


def test_a_state_dict_of_other_tables_changes_nothing():
    optimizer = RowWiseAdagrad(Tower(), lr=0.3, initial_accumulator=0.5)
    with pytest.raises(OptimizerError, match="the saved optimizer has groups of tables"):
        optimizer.load_state_dict(RowWiseAdagrad(nn.ModuleDict({"x": Tower()}), lr=0.3).state_dict())
    with pytest.raises(OptimizerError, match="the saved moments are"):
        optimizer.load_state_dict(RowWiseAdagrad(Tower(rows=13), lr=0.3).state_dict())
    with pytest.raises(OptimizerError, match="the saved moments are"):
        optimizer.load_state_dict(SGD(Tower(), lr=0.3).state_dict())
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


@pytest.mark.parametrize("overflow_at", [0, 1, 2])
def test_grad_scaler_skips_overflowing_steps_without_touching_a_row(overflow_at):
    model = Tower()
    optimizer = RowWiseAdagrad(model, lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        before, moments = model.values().clone(), optimizer.state_dict()["state"][0]["sum_of_squares"].clone()
        value = loss(model, batch(step))
        scaler.scale(value * float("inf") if step == overflow_at else value).backward()
        scaler.step(optimizer)
        touched = not torch.equal(model.values(), before)
        assert touched == (step != overflow_at)
        assert touched != torch.equal(optimizer.state_dict()["state"][0]["sum_of_squares"], moments)
        scale = scaler.get_scale()
        scaler.update()
        if step == overflow_at and step > 0:
            assert scaler.get_scale() == scale / 2


# -- bad arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_there_is_no_default_learning_rate(rule):
    with pytest.raises(TypeError, match="lr"):
        rule(Tower())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(nn.Linear(2, 2), lr=1.0), "Linear has no hotbed.EmbeddingCollection"),
        (
            lambda: SGD(Tower(), lr=-1.0),
            "SGD: lr is -1.0 for embeddings.a, embeddings.b; it must be finite and not negative",
        ),
        (lambda: SGD(Tower(), lr=float("nan")), "SGD: lr is nan"),
        (lambda: SGD(Tower(), lr=float("inf")), "SGD: lr is inf"),
        (lambda: RowWiseAdagrad(Tower(), lr=1.0, initial_accumulator=-1.0), "initial_accumulator is -1.0"),
        (lambda: RowWiseAdagrad(Tower(), lr=1.0, eps=0.0), "eps and initial_accumulator are both 0"),
        (lambda: RowWiseAdagrad(Tower(), lr=1.0, eps=-1e-8), "RowWiseAdagrad: eps is -1e-08"),
        (lambda: SGD(Tower(), lr=1.0, groups=[{"tables": ["c"]}]), "table 'c' does not exist"),
        (lambda: SGD(Tower(), lr=1.0, groups=[{"lr": 1.0}]), "an optimizer group needs 'tables'"),
        (
            lambda: SGD(Tower(), lr=1.0, groups=[{"tables": ["a"], "lrs": 1}]),
            "option 'lrs' does not exist; use .'lr'.; did",
        ),
        (
            lambda: SGD(Tower(), lr=1.0, groups=[{"tables": ["a"]}, {"tables": ["a"]}]),
            "table 'a' is in two optimizer groups",
        ),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()
