"""Protects: optimizers of named parameters do what TorchRec's documentation says of those of their names."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hotbed.compat.torchrec import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedJaggedTensor,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from hotbed.errors import OptimizerError, SpecError
from tests.ranks import Ranks


def wrapped(**params: Tensor) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        {name: nn.Parameter(value) for name, value in params.items()}, lambda p: torch.optim.Adagrad(p, lr=1.0)
    )


def test_states_have_the_names_of_parameters() -> None:
    first, second = (wrapped(a=torch.ones(2), b=torch.ones(1)) for _ in range(2))
    first.init_state()
    state = first.state_dict()
    assert list(state) == ["state"] and list(state["state"]) == ["a", "b"]
    state["state"]["a"]["sum"].fill_(5.0)
    second.load_state_dict(state)
    kept = second.state[second.params["a"]]["sum"]
    assert kept.tolist() == [5.0, 5.0]
    second.save_param_groups(True)
    saved = second.state_dict()
    assert saved["param_groups"][0]["params"] == ["a", "b"] and saved["param_groups"][0]["lr"] == 1.0
    saved["param_groups"][0]["lr"] = 0.5
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == 0.5 and second.optimizer.param_groups[0]["lr"] == 0.5
    second.load_state_dict(first.optimizer.state_dict())  # by numbers, as torch saves it
    with pytest.raises(OptimizerError, match="got a, expected a, b"):
        second.load_state_dict({"state": {"a": {}}})
    with pytest.raises(OptimizerError, match="state of b: got nothing, expected step, sum"):
        second.load_state_dict({"state": {**state["state"], "b": {}}})
    with pytest.raises(OptimizerError, match="add_param_group"):
        second.add_param_group({"params": []})
    with pytest.raises(OptimizerError, match="got 1 keys that are not in params"):
        KeyedOptimizer({"a": torch.ones(1)}, {torch.ones(1): {}}, [])


def test_combined_optimizers_join_names() -> None:
    one, two = wrapped(a=torch.ones(2)), wrapped(a=torch.ones(1))
    combined = CombinedOptimizer([one, ("two", two)])
    assert list(combined.params) == ["a", "two.a"] and len(combined.param_groups) == 2
    for param in combined.params.values():
        param.grad = torch.ones_like(param)
    combined.step()
    assert [p.tolist() for p in combined.params.values()] == [[0.0, 0.0], [0.0]]
    combined.zero_grad()
    assert all(p.grad is None for p in combined.params.values())
    combined.save_param_groups(True)
    state = combined.state_dict()
    assert list(state["state"]) == ["a", "two.a"]
    assert [group["params"] for group in state["param_groups"]] == [["a"], ["two.a"]]
    state["param_groups"][1]["lr"] = 3.0
    combined.load_state_dict(state)
    assert [group["lr"] for group in combined.param_groups] == [1.0, 3.0]
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert list(CombinedOptimizer([one, plain]).params) == ["a", "1.0"]
    with pytest.raises(SpecError, match="got a int, expected an optimizer"):
        CombinedOptimizer([3])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("clipping", "expected"),
    [(GradientClipping.NORM, [0.6, 0.8]), (GradientClipping.VALUE, [1.0, 1.0]), (GradientClipping.NONE, [3.0, 4.0])],
)
def test_gradients_are_clipped_before_a_step(clipping: GradientClipping, expected: list[float]) -> None:
    inner = KeyedOptimizerWrapper({"a": nn.Parameter(torch.zeros(2))}, lambda p: torch.optim.SGD(p, lr=1.0))
    optimizer = GradientClippingOptimizer(inner, clipping=clipping, max_gradient=1.0)
    (param,) = inner.params.values()
    param.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    torch.testing.assert_close(-param.detach(), torch.tensor(expected))
    optimizer.zero_grad()
    assert param.grad is None and optimizer.state_dict() == inner.state_dict()


P, S = WarmupPolicy, WarmupStage
# The learning rates that TorchRec 1.8 sets for these stages with lr 0.5, at each of seven steps.
SCHEDULES: list[tuple[list[WarmupStage], list[float]]] = [
    ([S(P.LINEAR, 3, 0.1)], [0.05, 0.2, 0.35, 0.5, 0.5, 0.5, 0.5]),
    (
        [S(P.CONSTANT, 2, 0.2), S(P.POLY, 6, 2.0, decay_iters=8)],
        [0.1, 0.1, 0.1, 0.1953125, 0.125, 0.0703125, 0.03125],
    ),
    ([S(P.STEP, 6, 0.5, lr_scale=2.0, decay_iters=2)], [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125]),
    (
        [S(P.CONSTANT, 1, 1.0), S(P.INVSQRT, 5)],
        [0.5, 0.5, 0.35355339, 0.28867513, 0.25, 0.2236068, 0.5],
    ),
    (
        [S(P.COSINE_ANNEALING_WARM_RESTARTS, 6, 0.1, sgdr_period=4)],
        [0.5, 0.43409903, 0.275, 0.11590097, 0.5, 0.43409903, 0.275],
    ),
    (
        [S(P.INTERPOLATE, 4, 0.2, start_interpolating_iters=0, end_value=0.6)],
        [0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.5],
    ),
]


@pytest.mark.parametrize(("stages", "expected"), SCHEDULES)
def test_schedules_are_torchrecs(stages: list[WarmupStage], expected: list[float]) -> None:
    optimizer = WarmupOptimizer(wrapped(a=torch.ones(1)), stages, lr=0.5)
    found: list[float] = []
    for _ in expected:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.init_state()
    assert found == pytest.approx(expected)


def test_a_schedule_goes_on_where_it_was_saved() -> None:
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    first = WarmupOptimizer(wrapped(a=torch.ones(1)), stages, lr=1.0)
    second = WarmupOptimizer(wrapped(a=torch.ones(1)), stages, lr=1.0)
    for _ in range(2):
        first.init_state()
    assert [first.param_groups[0]["lr"], second.param_groups[0]["lr"]] == [0.5, 0.0]
    state = first.state_dict()
    assert state["state"]["__warmup"]["warmup"].tolist() == [2, 0]
    second.load_state_dict(state)
    assert second.param_groups[0]["lr"] == 0.5
    with pytest.raises(SpecError, match="max_iters of a WarmupStage: got 4, expected more than 4"):
        WarmupOptimizer(wrapped(a=torch.ones(1)), [*stages, *stages])
    with pytest.raises(SpecError, match="start_interpolating_iters None"):
        WarmupOptimizer(wrapped(a=torch.ones(1)), [WarmupStage(WarmupPolicy.INTERPOLATE)])


IDS = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 1]))


def resumed(group: ProcessGroup | None, plan: str) -> tuple[list[str], bool]:
    """Train, save, load into another model and train on; return the names of the state, and whether it went on."""
    states: list[dict[str, Any]] = []
    made = [parallel(plan) for _ in range(2)]
    for model, optimizer in made:
        if states:
            model.load_state_dict(states[0])
            optimizer.init_state()
            optimizer.load_state_dict(states[1])
        for _ in range(2):
            optimizer.zero_grad()
            model(IDS).sum().backward()
            optimizer.step()
        if not states:
            states = [{n: t.clone() for n, t in model.state_dict().items()}, clone(optimizer.state_dict())]
            for _ in range(2):
                optimizer.zero_grad()
                model(IDS).sum().backward()
                optimizer.step()
    one, two = (model.state_dict() for model, _ in made)
    return sorted(states[1]["state"]), all(torch.equal(one[name], two[name]) for name in one)


def clone(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: clone(value) for key, value in state.items()}
    return state.clone() if isinstance(state, Tensor) else state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 16, "t", feature_names=["f"])])
        self.over = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values())


def parallel(plan: str) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    torch.manual_seed(1)
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(model, plan=plan)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    keyed = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.1))
    return model, CombinedOptimizer([model.fused_optimizer, keyed])


def test_states_of_a_distributed_model_have_the_names_of_its_state(ranks: Ranks) -> None:
    names = ["ebc.embedding_bags.t.weight", "over.bias", "over.weight"]
    assert resumed(None, "table") == (names, True)
    assert ranks.run(3, resumed, "row") == [(names, True)] * 3


def test_gradients_of_tensors_that_are_no_parameters_are_clipped() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    inner = KeyedOptimizerWrapper({"w": weight}, lambda params: torch.optim.SGD(params, lr=0.0))
    for kind, expected in ((GradientClipping.VALUE, [1.0, 1.0]), (GradientClipping.NORM, [0.6, 0.8])):
        weight.grad = torch.tensor([3.0, 4.0])
        GradientClippingOptimizer(inner, clipping=kind, max_gradient=1.0).step()
        assert weight.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_optimizers_are_copied_by_pickle() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    inner = KeyedOptimizerWrapper({"w": weight}, lambda params: torch.optim.Adagrad(params, lr=0.1))
    combined = CombinedOptimizer([("part", inner)])
    weight.grad = torch.tensor([3.0, 4.0])
    combined.step()
    copy = pickle.loads(pickle.dumps(combined))
    assert str(copy.state_dict()) == str(combined.state_dict())
