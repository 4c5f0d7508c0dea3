"""Protects: what code does to embeddings of torch works with swapped ones, or is refused in one clear line."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import hotbed as hb
from hotbed.errors import BatchError, SpecError
from tests.compat.test_torch_nn import batch, net, optimizers_of, train
from tests.ranks import Ranks


def pair(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """Make a module of torch, and the same one swapped."""
    torch.manual_seed(0)
    theirs = make()
    return theirs, hb.swap_embeddings(copy.deepcopy(theirs))


def gradient_of(ours: Any, output: Tensor) -> Tensor:
    """Return the gradient of the rows, as the change of a step with rate 1."""
    before = ours.weight.detach().clone()
    optimizer = hb.optim.SGD(ours, lr=1.0)
    output.sum().backward()
    optimizer.step()
    return before - ours.weight.detach()


@pytest.mark.parametrize("bag", [[1, 2], [2, 1], [3, 3, 1], [4, 1, 2], [5, 5], [2, 4]])
@pytest.mark.parametrize("padding", [None, 4])
def test_the_maximum_of_a_bag_has_the_gradient_of_torch(bag: list[int], padding: int | None) -> None:
    """Also where it is 0, where rows are equal, and where a row is infinite."""
    theirs, ours = pair(lambda: nn.EmbeddingBag(6, 3, mode="max", padding_idx=padding))
    rows = torch.tensor([[9.0, 9, 9], [0, -1, 2], [0, -1, 2], [-1, 0, 2], [7, 7, 7], [-torch.inf, 0, 1]])
    theirs.load_state_dict({"weight": rows})
    ours.load_state_dict({"weight": rows})
    ids = torch.tensor([*bag, 3]), torch.tensor([0, len(bag), len(bag)])
    expected = theirs(*ids)
    expected.sum().backward()
    found = ours(*ids)
    assert torch.equal(found, expected)
    gradient = gradient_of(ours, found).nan_to_num()  # of infinite rows, whose change is NaN
    assert torch.equal(gradient, theirs.weight.grad.where(rows.isfinite(), 0.0))


def frozen_by(how: str, model: Any) -> None:
    module = model["net"]["user"]
    if how == "model":
        assert model.requires_grad_(False) is model
    elif how == "part":
        model["net"].requires_grad_(False)
    elif how == "module":
        assert module.requires_grad_(False) is module
    elif how == "weight":
        module.weight.requires_grad_(False)
    else:
        module.weight.requires_grad = False


@pytest.mark.parametrize("how", ["model", "part", "module", "weight", "attribute"])
def test_a_model_is_frozen_and_trained_again_as_a_model_of_torch_is(how: str) -> None:
    model: Any = hb.swap_embeddings(nn.ModuleDict({"net": nn.ModuleDict({"user": nn.Embedding(6, 4)})}))
    model = copy.deepcopy(model)
    module = model["net"]["user"]
    frozen_by(how, model)
    assert not module.weight.requires_grad and not module(torch.tensor([1])).requires_grad
    model.requires_grad_(True)
    assert module.weight.requires_grad
    torch.testing.assert_close(gradient_of(module, module(torch.tensor([1])))[1], torch.ones(4))


def test_a_collection_is_frozen_as_any_module_is() -> None:
    tables = hb.EmbeddingCollection([hb.Table("a", 5, 4)], [hb.Feature("a", "a")])
    ids = hb.Jagged.from_dict({"a": torch.tensor([1])})
    assert not tables.requires_grad_(False)(ids)["a"].requires_grad
    assert tables.requires_grad_()(ids)["a"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_to_a_weight_are_kept(dtype: torch.dtype) -> None:
    theirs, ours = pair(lambda: nn.Embedding(6, 4, dtype=dtype))
    values = torch.arange(24).view(6, 4).to(dtype)
    for module in (theirs, ours):
        assert module.weight.dtype == dtype
        with torch.no_grad():
            module.weight[3] = 5
            module.weight[4].fill_(7)
        module.weight.data[2] = 9
        nn.init.zeros_(module.weight[:1].detach())
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours(torch.arange(6)), theirs(torch.arange(6)))
    for module in (theirs, ours):
        module.weight.data = values.clone()
    assert torch.equal(ours(torch.arange(6)), values)
    saved = io.BytesIO()
    torch.save({"w": ours.weight}, saved)
    saved.seek(0)
    assert type(torch.load(saved, weights_only=True)["w"]) is Tensor
    with torch.no_grad():
        assert type(copy.deepcopy(ours.weight)) is Tensor


def test_a_weight_is_not_replaced() -> None:
    model: Any = hb.swap_embeddings(nn.ModuleDict({"user": nn.Embedding(6, 4)}))
    with pytest.raises(SpecError, match=r"'user' is a table: got a new Parameter.*weight.copy_\(values\)"):
        model["user"].weight = nn.Parameter(torch.zeros(6, 4))


def test_gradients_are_dropped_by_the_model() -> None:
    """Also those of one module among several that share an optimizer."""
    model: Any = hb.swap_embeddings(nn.ModuleDict({"a": nn.Embedding(6, 4), "b": nn.Embedding(6, 4)}))
    optimizer = hb.optim.SGD(model, lr=1.0)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ids = torch.tensor([1])
    (model["a"](ids) + model["b"](ids)).sum().backward()
    model.zero_grad()
    optimizer.step()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    (model["a"](ids) + model["b"](ids)).sum().backward()
    model["a"].zero_grad()
    optimizer.step()
    assert torch.equal(model["a"].weight, before["a.weight"])
    assert not torch.equal(model["b"].weight, before["b.weight"])


def test_states_that_do_not_fit_are_reported_by_the_names_of_torch() -> None:
    torchs, ours = net(), hb.swap_embeddings(net())
    state = {name: t for name, t in torchs.state_dict().items() if name not in ("friend.weight", "bags.max.weight")}
    state |= {"user.scale": torch.ones(1)}
    expected, found = torchs.load_state_dict(state, strict=False), ours.load_state_dict(state, strict=False)
    assert sorted(found.missing_keys) == sorted(expected.missing_keys) == ["bags.max.weight", "friend.weight"]
    assert found.unexpected_keys == expected.unexpected_keys == ["user.scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"friend.weight", "bags.max.weight"(?s:.*)"user.scale"'):
        ours.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_ids_and_offsets_of_few_bits(dtype: torch.dtype) -> None:
    theirs, ours = pair(lambda: nn.EmbeddingBag(6, 4, mode="sum"))
    ids, offsets = torch.tensor([5, 1, 2]), torch.tensor([0, 2])
    assert torch.equal(ours(ids.to(dtype), offsets), theirs(ids.to(dtype), offsets))
    assert torch.equal(ours(ids, offsets.to(dtype)), theirs(ids, offsets.to(dtype)))
    assert torch.equal(
        hb.swap_embeddings(nn.Embedding.from_pretrained(theirs.weight))(ids.to(dtype)), theirs.weight[ids]
    )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_offsets_that_cannot_be(mode: Any) -> None:
    ids = torch.tensor([1, 2])
    module = hb.swap_embeddings(nn.EmbeddingBag(6, 4, mode=mode, include_last_offset=True))
    for offsets in (torch.tensor([0.0, 2.0]), torch.tensor([False, True])):
        with pytest.raises(
            BatchError, match=rf"offsets of 'weight' are not integers: got {str(offsets.dtype)[6:]} \[2\]"
        ):
            module(ids, offsets)
    with pytest.raises(BatchError, match="offsets: got 0, expected at least 1"):
        module(ids[:0], ids[:0])
    assert module(ids[:0], torch.tensor([0])).shape == (0, 4)


def test_ids_that_are_no_rows_say_where_rows_come_from() -> None:
    for module in (nn.Embedding(6, 4), nn.EmbeddingBag(6, 4, mode="mean")):
        model: Any = hb.swap_embeddings(nn.ModuleDict({"user": module}))
        for bad in (6, -1):
            with pytest.raises(BatchError, match=rf"'user': got id {bad} at position 1, expected 0 to 5"):
                model["user"](torch.tensor([[2, bad]]))


# -- compilers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_one_graph_and_trains_as_ever(backend: str) -> None:
    states = []
    for compiled in (False, True):
        model = hb.swap_embeddings(net())
        step = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        optimizers = optimizers_of(model)
        for seed in range(3):
            x = batch(seed, samples=6 + seed)
            x["weights"].requires_grad_()
            (step(x) - 1).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        states.append({**model.state_dict(), "of weights": x["weights"].grad})
    torch.testing.assert_close(states[0], states[1], rtol=1e-6, atol=1e-6)
    with pytest.raises(BatchError, match="got id 30 at position 0, expected 0 to 29, the rows of table 'user'"):
        torch.compile(model, fullgraph=True, backend=backend)({**x, "user": x["user"] * 0 + 30})


@pytest.mark.usefixtures("_fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_padding_is_left_out_in_a_compiled_bag_with_weights() -> None:
    ids, found = torch.tensor([[1, 2, 5], [2, 2, 2]]), []
    for compiled in (False, True):
        _, ours = pair(lambda: nn.EmbeddingBag(6, 4, mode="sum", padding_idx=2))
        weights = torch.linspace(0.5, 2, 6).view(2, 3).requires_grad_()
        call = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
        output = call(ids, per_sample_weights=weights)
        found.append((output.detach(), gradient_of(ours, output.square()), weights.grad))
    torch.testing.assert_close(found[0], found[1])
    assert not found[0][1][2].any() and found[0][2] is not None and not found[0][2][:, 1].any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_narrow_rows_are_exported_as_they_are(strict: bool) -> None:
    theirs, ours = pair(lambda: nn.Embedding(6, 4, dtype=torch.bfloat16))
    program = torch.export.export(ours, (torch.tensor([1, 5]),), strict=strict)
    assert torch.equal(program.module()(torch.tensor([3, 0])), theirs(torch.tensor([3, 0])))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # by the loader of torch 2.11
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_computes_without_tables(strict: bool) -> None:
    model = hb.swap_embeddings(net()).eval()
    shapes = {name: {0: torch.export.Dim.AUTO} for name in batch(1)}
    program = torch.export.export(model, (batch(1),), dynamic_shapes=(shapes,), strict=strict)
    assert not any("hotbed" in str(node.target) for node in program.graph.nodes)
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    with torch.no_grad():
        torch.testing.assert_close(loaded(batch(2, samples=9)), model(batch(2, samples=9)))


def refused() -> list[tuple[str, Callable[[Any], object], str]]:
    ids = torch.tensor([1, 2])
    return [
        ("script", torch.jit.script, "torch.jit.script cannot compile"),
        ("trace", lambda model: torch.jit.trace(model, ids), "torch.jit.trace cannot record"),
        ("fx", torch.fx.symbolic_trace, r"'user': got a Proxy"),
        ("vmap", lambda model: torch.vmap(model)(ids), r"torch.func \(vmap, grad"),
        (
            "functional_call",
            lambda model: torch.func.functional_call(model, {"user.weight": torch.zeros(6, 4)}, (ids,)),
            "'user' is a table: got a new Tensor",
        ),
        ("deepcopy to meta", lambda model: model.to("meta")(ids.to("meta")), "got int64 .* on meta"),
    ]


class User(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.user(ids)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("call", "message"), [case[1:] for case in refused()], ids=[case[0] for case in refused()])
def test_other_compilers_and_transforms_are_refused_in_one_line(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises((SpecError, BatchError), match=message) as raised:
        call(hb.swap_embeddings(User()))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("move", [lambda model: model.to_empty(device="cpu"), lambda model: model.cpu()])
def test_tables_on_meta_are_made_by_distribute(move: Callable[[Any], object]) -> None:
    with torch.device("meta"):
        model = User()
    with pytest.raises(SpecError, match=r"on meta .* for user. Call hotbed.distribute\(model, device='cpu'\)"):
        move(hb.swap_embeddings(model))


def copied_rows(group: ProcessGroup) -> list[str]:
    """Write to rows that ranks share: to a copy is refused, to all of them is done."""
    model: Any = hb.distribute(hb.swap_embeddings(User()), "row")
    errors = []
    for write in (
        lambda: model.user.weight.fill_(1),
        lambda: model.user.weight.__setitem__(0, 1.0),
        lambda: model.user.weight.data.uniform_(),
        lambda: model.user.weight.data.__setitem__(0, 0.0),
        lambda: nn.init.xavier_uniform_(model.user.weight.data),
        lambda: model.user.weight[0].fill_(3),
        lambda: model.user.weight.detach().view(-1)[2:].requires_grad_().zero_(),
        lambda: model.user.weight.unbind()[0].zero_(),
        model.user.reset_parameters,
        lambda: torch.export.export(model.user, (torch.tensor([1]),)),
    ):
        with torch.no_grad(), pytest.raises(SpecError) as raised:
            write()
        errors.append(str(raised.value))
    with torch.no_grad():
        model.user.weight.clone().fill_(1)
        view: Any = copy.deepcopy(model.user.weight[0])
    assert type(view) is Tensor and view.__reduce_ex__(2)
    assert type(model.user.weight + 1) is Tensor and type(model.user.weight.data.as_subclass(Tensor)) is Tensor
    saved = io.BytesIO()
    torch.save(model.user.weight.data, saved)
    saved.seek(0)
    assert type(torch.load(saved, weights_only=True)) is Tensor
    model.user.weight.data = torch.full((6, 4), 3.0)
    assert torch.equal(model.user.weight, torch.full((6, 4), 3.0))
    assert not model.requires_grad_(False)(torch.tensor([1])).requires_grad
    model.requires_grad_(True)
    optimizer = hb.optim.SGD(model, lr=1.0)
    model(torch.tensor([1])).sum().backward()
    model.zero_grad()
    optimizer.step()
    assert torch.equal(model.user.weight, torch.full((6, 4), 3.0))
    return errors


def test_rows_that_ranks_share(ranks: Ranks) -> None:
    for errors in ranks.run(3, copied_rows):
        assert len(errors) == 10 and all("table 'user'" in error for error in errors)
        assert all("on a copy of its rows" in error for error in errors[:8])
        assert "reset_parameters()" in errors[8] and "torch.export" in errors[9]


def test_swapped_models_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model: Any = hb.swap_embeddings(net())
        other: Any = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        other.requires_grad_(False)
        assert not other.user.weight.requires_grad and model.user.weight.requires_grad
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_model_that_trains_after_all_this_trains_as_ever() -> None:
    first, second = hb.swap_embeddings(net()), hb.swap_embeddings(net())
    second.zero_grad()
    second.requires_grad_(False)
    second.requires_grad_(True)
    for model in (first, second):
        train(model, optimizers_of(model), [batch(1)])
    assert all(torch.equal(t, second.state_dict()[name]) for name, t in first.state_dict().items())


# -- initial values ----------------------------------------------------------------------------------------------------


def test_the_generator_of_torch_decides_on_initial_values() -> None:
    rows = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.device("meta"):
            models = [User(), User()]
        made: list[Any] = [hb.distribute(hb.swap_embeddings(model), device="cpu") for model in models]
        rows.append([model.user.weight.detach() for model in made])
    assert torch.equal(rows[0][0], rows[1][0]) and torch.equal(rows[0][1], rows[1][1])
    assert not torch.equal(rows[0][0], rows[2][0]) and not torch.equal(rows[0][0], rows[0][1])


def test_a_model_on_a_device_leaves_the_generator_alone() -> None:
    torch.manual_seed(3)
    User()
    expected = torch.rand(3)
    torch.manual_seed(3)
    hb.swap_embeddings(User())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_reset_as_those_of_torch(dtype: torch.dtype) -> None:
    theirs, ours = pair(lambda: nn.Embedding(6, 4, padding_idx=2, dtype=dtype))
    for module in (theirs, ours):
        torch.manual_seed(9)
        module.reset_parameters()
    assert torch.equal(ours.weight, theirs.weight) and not ours.weight[2].any()


def of_other_seeds(group: ProcessGroup, plan: str, meta: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(group.rank())
    with torch.device("meta" if meta else "cpu"):
        model = nn.ModuleDict({"narrow": nn.Embedding(7, 16, dtype=torch.bfloat16), "user": nn.Embedding(13, 16)})
    model = hb.distribute(hb.swap_embeddings(model), plan, device="cpu")
    return tuple(model.module[name](torch.arange(7)).detach() for name in ("narrow", "user"))


@pytest.mark.parametrize("meta", [False, True])
def test_ranks_of_other_seeds_take_the_values_of_the_first(ranks: Ranks, meta: bool) -> None:
    first = ranks.run(3, of_other_seeds, "table", meta)[0]
    for plan in ("dp", "row"):
        for rows in ranks.run(3, of_other_seeds, plan, meta):
            assert all(map(torch.equal, rows, first))
    if not meta:
        torch.manual_seed(0)
        assert torch.equal(first[0], nn.Embedding(7, 16, dtype=torch.bfloat16).weight)
