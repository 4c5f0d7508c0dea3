"""Each private symbol of torch does what hotbed expects of it, and no other file uses private symbols of torch."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hotbed
from hotbed import torch_private as private

SEEN = dict.fromkeys(
    (
        *("running_backward", "call_after_backward", "version", "storage_id", "copy_all_", "has_cuda_kernel"),
        *("has_onednn_linear", "has_onednn_bf16", "onednn_product", "is_exporting", "is_in_functorch"),
        *("is_traced_or_dual", "make_number_while_tracing", "check_in_graph", "hooks_of", "EXPORT_LOGGER"),
        *("NoSubclasses", "TorchDispatchMode", "GetAttrKey", "TreeSpec", "register_pytree_node"),
        *("register_pytree_flatten_spec", "tree_leaves", "is_compiled", "count_step"),
    ),
    ("2.11", "2.13"),
)
"""The releases of torch in which all tests that use a symbol have passed."""
HOOKS = r"\._(\w+_hooks|compiled_call_impl|version|cdata)\b|_opt_called"
USE = re.compile(rf"\btorch\.(?:\w+\.)*_[a-zA-Z]|^\s*from torch\S* import _|{HOOKS}")
QUOTED = re.compile(r"#.*|`[^`]*`|\"[^\"]*\"")


def test_every_symbol_has_its_releases() -> None:
    defined = {name for name, thing in vars(private).items() if getattr(thing, "__module__", "") == private.__name__}
    public = {name for name in defined if not name.startswith("_")}
    taken = set(SEEN) - public
    assert all(hasattr(private, name) for name in taken)
    assert public <= set(SEEN)


def test_release() -> None:
    here = ".".join(torch.__version__.split(".")[:2])
    unseen = [name for name, releases in SEEN.items() if here not in releases]
    if unseen:
        pytest.skip(f"torch {here} is new to {', '.join(unseen)}: add it to SEEN once all tests have passed")


def test_no_other_file_uses_private_symbols() -> None:
    package = Path(hotbed.__file__).parent
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if USE.search(QUOTED.sub("", line.replace("self._optimizer", "")))
    ]
    assert not found


def test_a_backward_pass_has_a_number_and_an_end() -> None:
    seen: list[object] = []

    def hook(_: Tensor) -> None:
        seen.append(private.running_backward())
        private.call_after_backward(lambda: seen.append("over"))

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    seen.append("after")
    assert isinstance(seen[0], int)
    assert seen[0] >= 0
    assert seen[1:] == ["over", "after"]
    assert private.running_backward() == -1


def test_versions_count_changes_in_place() -> None:
    t = torch.zeros(2)
    before = private.version(t)
    t.add_(1)
    assert private.version(t) == before + 1
    with torch.inference_mode():
        assert private.version(torch.zeros(1)) == -1


def test_storages_are_told_apart() -> None:
    t, other = torch.zeros(4), torch.zeros(4)
    assert private.storage_id(t.untyped_storage()) == private.storage_id(t[1:].untyped_storage())
    assert private.storage_id(t.untyped_storage()) != private.storage_id(other.untyped_storage())


def test_tensors_are_copied_at_once() -> None:
    targets = torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)
    private.copy_all_(targets, (torch.ones(2), torch.full((3,), 2.0)))
    assert [t.tolist() for t in targets] == [[1, 1], [2, 2, 2]]


def test_builds_are_asked_for_kernels() -> None:
    assert private.has_cuda_kernel("aten::mm") == torch.backends.cuda.is_built()
    assert isinstance(private.has_onednn_bf16(), bool)


@pytest.mark.skipif(not private.has_onednn_linear(), reason="this build of torch has no oneDNN")
def test_onednn_multiplies() -> None:
    a, b, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(private.onednn_product(a, b, bias), a @ b.T + bias)


def test_tracing_is_noticed() -> None:
    seen: dict[str, bool] = {}

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen["exporting"] = private.is_exporting()
            return x + 1

    torch.export.export(Model(), (torch.zeros(2),), strict=False)
    assert seen == {"exporting": True}
    assert not private.is_exporting()

    def inside(x: Tensor) -> Tensor:
        seen["transformed"] = private.is_in_functorch() and private.is_traced_or_dual([x])
        return x.sum()

    torch.func.grad(inside)(torch.ones(2))
    assert seen["transformed"]
    assert not private.is_in_functorch()
    assert not private.is_traced_or_dual([torch.ones(2)])
    with torch.autograd.forward_ad.dual_level():
        assert private.is_traced_or_dual([torch.ones(2)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch, of what its compiler imports
def test_compiled_models_and_skipped_steps_are_noticed() -> None:
    layer = nn.Linear(2, 2)
    assert not private.is_compiled(layer)
    layer.compile(backend="eager")
    assert private.is_compiled(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    private.count_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns of schedules that step before their optimizer
        schedule.step()


def test_hooks_are_found() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    hooks = [lambda *_: None for _ in range(4)]
    layer.register_forward_hook(hooks[0])
    layer.register_full_backward_hook(hooks[1])
    layer.weight.register_post_accumulate_grad_hook(hooks[2])
    optimizer.register_step_pre_hook(hooks[3])
    assert private.hooks_of(layer) == [hooks[0], hooks[1]]
    assert private.hooks_of(layer.weight) == [hooks[2]]
    assert private.hooks_of(optimizer) == [hooks[3]]
    assert private.hooks_of(layer.bias) == []
