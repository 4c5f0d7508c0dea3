"""Protects: what works with other modules of torch works with tables, or ends in an error that says what does."""

from __future__ import annotations

import gc
import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.embed.embedding_tables import CALLS_BEFORE_WARNING
from hotbed.errors import BatchError, OptimizerError, SpecError
from hotbed.optim import SGD, TableSelection


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection([hb.Table("items", 10, 4)], [hb.Feature("item", table="items")])
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Any) -> Tensor:
        return self.out(self.embeddings(ids)["item"])


def ids() -> hb.Jagged:
    return hb.Jagged.from_dict({"item": torch.tensor([3, 5, 3])})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vectors_follow_a_model_that_is_converted_and_rows_stay(dtype: torch.dtype) -> None:
    model = Scorer()
    before = model.embeddings.weight("items").clone()
    model = model.half() if dtype == torch.float16 else model.bfloat16()
    assert model.embeddings.weight("items").dtype == torch.float32
    assert torch.equal(model.embeddings(ids())["item"], before[[3, 5, 3]].to(dtype))
    optimizer = SGD(model, lr=1.0)
    model(ids()).float().sum().backward()
    optimizer.step()
    step = before[[3, 5]] - model.embeddings.weight("items")[[3, 5]]
    torch.testing.assert_close(step, torch.stack([2 * model.out.weight[0], model.out.weight[0]]).float().detach())
    assert model.float()(ids()).dtype == torch.float32
    assert Scorer().to(dtype)(ids()).dtype == dtype


def test_a_model_of_float64_says_how_vectors_become_so() -> None:
    with pytest.raises(SpecError, match=r"got torch\.float64, expected float32, float16 or bfloat16"):
        Scorer().double()(ids())


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: [{"params": list(model.parameters()), "lr": 0.1}],
        lambda model: dict(model.named_parameters()),
        lambda model: None,
    ],
    ids=["generator", "list", "groups", "dict", "None"],
)
def test_parameters_in_the_place_of_the_model(given: Any) -> None:
    with pytest.raises(SpecError, match=r"expected the model, because model\.parameters\(\) has no"):
        SGD(given(Scorer()), lr=0.1)
    with pytest.raises(SpecError, match="expected the model"):
        TableSelection(given(Scorer()), ["embeddings.items"])


class Keyed:
    """What TorchRec's KeyedJaggedTensor has."""

    def keys(self) -> list[str]:
        return ["item"]

    def values(self) -> Tensor:
        return torch.tensor([3, 5, 3])

    def lengths(self) -> Tensor:
        return torch.tensor([1, 1, 1])

    def weights_or_none(self) -> None:
        return None


BAGS = torch.tensor([3, 5, 3])
LACKING = r"Offsets are \[B \+ 1\]\..* torch.cat\(\[offsets, offsets.new_tensor\(\[len\(ids\)\]\)\]\)"
IDS: dict[str, tuple[Any, str]] = {
    "as in TorchRec": (Keyed(), r"got Keyed, expected a dict .* Use Jagged.from_keyed\(ids.keys\(\), ids.v"),
    "a list": ([BAGS], r"got list, expected a dict of ids by name. Use Jagged.from_dict\({'FEATURE'"),
    "offsets as in torch": (
        {"item": (BAGS, torch.tensor([0, 2, 2]))},
        rf"feature 'item': last offset: got 2, expected .* 3. {LACKING}",
    ),
    "the fewer samples first": (
        {"item": (BAGS, torch.tensor([0, 3])), "user": torch.tensor([1, 2])},
        rf"feature 'user': got 2 samples, expected 1 as in 'item'. {LACKING}",
    ),
    "the fewer samples last": (
        {"user": torch.tensor([1, 2]), "item": (BAGS, torch.tensor([0, 3]))},
        rf"feature 'item': got 1 samples, expected 2 as in 'user'. {LACKING}",
    ),
}


@pytest.mark.parametrize(("given", "message"), IDS.values(), ids=IDS)
def test_ids_that_are_no_dict_or_have_offsets_as_in_torch_say_what_they_lack(given: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        hb.Jagged.from_dict(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Keyed(), r"got Keyed, expected hotbed\.Jagged"),
        ({"item": BAGS}, r"got dict, .* Jagged.from_dict\(ids\).*offsets \[B \+ 1\]"),
        (BAGS, r"got Tensor, .*EmbeddingBag's offsets \[B\]"),
        ([[3], [5]], r"expected hotbed.Jagged. Use Jagged.from_dict\({'FEATURE'"),
        (None, r"expected hotbed.Jagged. Use Jagged.from_dict\({'FEATURE'"),
    ],
    ids=["as in TorchRec", "dict", "tensor", "list", "None"],
)
def test_a_model_that_is_given_no_jagged_says_how_to_make_one(given: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Scorer()(given)


def train(model: Scorer, batches: int) -> None:
    for _ in range(batches):
        model(ids()).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * cast(Tensor, parameter.grad)


def test_optimizers_that_are_gone_do_not_train() -> None:
    model = Scorer()
    SGD(model, lr=0.1)
    gc.collect()
    model(ids()).sum().backward()
    with pytest.raises(OptimizerError, match="items"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_optimizer_of_another_model_does_not_hide_a_lost_gradient() -> None:
    model, other = Scorer(), nn.Linear(2, 1)
    first, second = torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(ids()).sum().backward()
        first.step()
        with pytest.raises(OptimizerError, match="items"):
            second.step()


def test_a_refused_model_does_not_block_a_correct_one() -> None:
    """A refused model without parameters could belong to any optimizer, and it may not be collected yet."""
    refused, correct = hb.swap_embeddings(nn.ModuleDict({"a": nn.Embedding(5, 4)})), Scorer()
    factor = torch.ones(4, requires_grad=True)
    (refused["a"](torch.tensor([1])) * factor).sum().backward()
    with pytest.raises(OptimizerError, match="'a'"):
        torch.optim.SGD([factor], lr=0.1).step()
    tables, dense = SGD(correct, lr=0.1), torch.optim.SGD(correct.parameters(), lr=0.1)
    correct(ids()).sum().backward()
    tables.step()
    dense.step()
    refused["a"](torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="'a'"):
        torch.optim.SGD([factor], lr=0.1).step()
    refused.requires_grad_(False)


def test_modules_without_their_constructor_do_not_matter() -> None:
    model, bare = Scorer(), nn.Linear.__new__(nn.Linear)
    model(ids()).sum().backward()
    with pytest.raises(OptimizerError, match=r"gradient of 1 embedding table \('items'\)"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    del bare


def test_tables_that_no_optimizer_trains_are_warned_of_once() -> None:
    model = Scorer()
    train(model, CALLS_BEFORE_WARNING - 1)
    with pytest.warns(UserWarning, match=r"no optimizer trains items of 1 tables after 10 batches, .* Create one"):
        train(model, 1)
    train(model, 20)


@pytest.mark.parametrize("how", ["optimizer", "frozen", "no_grad", "eval"])
def test_nobody_is_warned_of_tables_that_are_trained_or_are_not_to_be(how: str) -> None:
    model = Scorer()
    kept = SGD(model, lr=0.1) if how == "optimizer" else None
    if how == "frozen":
        model.embeddings.freeze()
    if how == "eval":
        model.eval()
    with warnings.catch_warnings(), torch.set_grad_enabled(how != "no_grad"):
        warnings.simplefilter("error")
        for _ in range(2 * CALLS_BEFORE_WARNING):
            model(ids())
    del kept
