"""Protects: precision and library are chosen by what all ranks have, kept in checkpoints, and never change unsaid."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotbed.config import Component, TrainRecipe
from hotbed.errors import RecipeError
from hotbed.machine import Cpu
from hotbed.nn.linear import Linear
from hotbed.torch_private import has_onednn_linear
from hotbed.train import Trainer, numerics
from hotbed.train.numerics import Numerics, bf16_instructions
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.runs.build import fuse_optimizer
from tests.train import planted
from tests.train.parallel_cases import make_trainer

AUTO = TrainRecipe(batch_size=64, device="cpu", steps=2)
CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not has_onednn_linear(), reason="this build of torch has no oneDNN")


def has(monkeypatch: pytest.MonkeyPatch, instructions: str | None, library: str = "torch") -> None:
    monkeypatch.setattr(numerics, "bf16_instructions", lambda _: instructions)
    monkeypatch.setattr(numerics, "faster_library", lambda: library)


def dtype_of_products(trainer: Trainer) -> torch.dtype:
    """Of the first layer's output in a step."""
    seen: list[torch.dtype] = []

    def note(module: object, inputs: object, output: Tensor) -> None:
        seen.append(output.dtype)

    layer = next(m for m in trainer.model.modules() if isinstance(m, Linear))
    with layer.register_forward_hook(note):
        trainer.fit(planted.batches(2))
    return seen[0]


@pytest.mark.parametrize(
    ("flags", "most", "has_onednn", "name"),
    [
        ("avx512_bf16 amx_bf16", None, True, "AMX"),
        ("avx512f avx512_bf16", None, True, "AVX-512 BF16"),
        ("asimd bf16", None, True, "Arm BF16"),
        ("avx2 avx512f", None, True, None),
        ("amx_bf16", "avx2", True, None),
        ("amx_bf16", "AVX512_CORE", True, None),
        ("amx_bf16", "AVX512_CORE_BF16", True, "AMX"),
        ("amx_bf16", None, False, None),
    ],
)
def test_instructions_of_a_cpu_have_a_name_if_onednn_may_use_them(
    monkeypatch: pytest.MonkeyPatch, flags: str, most: str | None, has_onednn: bool, name: str | None
) -> None:
    monkeypatch.setattr(numerics, "cpu", lambda: Cpu("a CPU", "some", False, 0, frozenset(flags.split())))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    if most is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    assert bf16_instructions(CPU) == name


def test_a_gpu_that_emulates_bf16_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: asked.append(including_emulation))
    assert bf16_instructions(torch.device("cuda")) is None
    assert asked == [False]


@pytest.mark.parametrize(
    ("instructions", "dtype", "said"),
    [
        ("AMX", torch.bfloat16, "precision bf16 (this CPU has AMX)"),
        (None, torch.float32, "precision fp32 (this CPU has no instructions for bf16); matrix products by the library"),
    ],
)
def test_auto_is_bf16_where_the_cpu_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, instructions: str | None, dtype: torch.dtype, said: str
) -> None:
    has(monkeypatch, instructions)
    trainer = planted.trainer(AUTO)
    assert dtype_of_products(trainer) == dtype
    assert trainer.numerics.settle().startswith(said)
    summary = trainer.numerics.summary()
    assert f"precision {summary['precision']} ({summary['precision_because']})" in said


def test_a_precision_that_is_asked_for_is_taken_and_emulation_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has(monkeypatch, None)
    assert dtype_of_products(planted.trainer(replace(AUTO, precision="bf16"))) == torch.bfloat16
    assert "this CPU has no bf16 instructions" in caplog.text
    caplog.clear()
    has(monkeypatch, "AMX")
    assert dtype_of_products(planted.trainer(replace(AUTO, precision="fp32"))) == torch.float32
    assert not caplog.text


def resumed(state: dict[str, Any], recipe: TrainRecipe) -> Trainer:
    again = planted.trainer(recipe)
    again.load_state_dict(state)
    return again


def state_of_a_run() -> dict[str, Any]:
    trainer = planted.trainer(AUTO)
    trainer.numerics.settle()
    return trainer.state_dict()


def test_a_resumed_run_keeps_its_precision_and_library_on_another_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has(monkeypatch, "AMX", "onednn")
    monkeypatch.setattr(numerics, "has_onednn_linear", lambda: True)
    monkeypatch.setattr(Linear, "use", lambda self, library: setattr(self, "uses", library))
    monkeypatch.setattr(numerics, "cpu", lambda: Cpu("a CPU", "AMD 26", True, 26, frozenset()))
    before = state_of_a_run()
    has(monkeypatch, None, "torch")
    monkeypatch.setattr(numerics, "cpu", lambda: Cpu("a CPU", "AMD 25", True, 25, frozenset()))
    after = resumed(before, AUTO)
    assert after.numerics.settle() == "precision bf16 (the checkpoint)"
    assert {m.uses for m in after.model.modules() if isinstance(m, Linear)} == {"onednn"}
    assert "this run was started on AMD 26 and is resumed on AMD 25" in caplog.text
    assert "precision is bf16 (the checkpoint), but this CPU has no bf16 instructions" in caplog.text


def test_another_precision_than_a_checkpoint_s_is_taken_if_asked_for_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has(monkeypatch, "AMX")
    before = state_of_a_run()
    after = resumed(before, replace(AUTO, precision="fp32"))
    assert after.numerics.settle().startswith("precision fp32 (the recipe)")
    assert "train.precision was bf16 and is now fp32" in caplog.text
    caplog.clear()
    assert resumed(before, replace(AUTO, precision="bf16")).numerics.precision == "bf16"
    assert not caplog.text


@needs_onednn
def test_the_library_is_the_recipe_s_or_the_faster_one_but_for_layers_that_name_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has(monkeypatch, None, "onednn")
    model = torch.nn.Sequential(Linear(2, 2), Linear(2, 2, library="torch"))
    for asked, expected in (("auto", "onednn"), ("torch", "torch"), ("onednn", "onednn")):
        chosen = Numerics(model, replace(AUTO, linear_library=asked), CPU, Ranks(model))
        chosen.settle()
        assert [layer.uses for layer in model] == [expected, "torch"]
        assert chosen.library == expected


def test_a_library_that_is_not_there_is_replaced_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numerics, "has_onednn_linear", lambda: False)
    trainer = planted.trainer(replace(AUTO, linear_library="onednn"))
    trainer.numerics.settle()
    assert trainer.numerics.library == "torch"
    assert "oneDNN on 1 of 1 ranks" in caplog.text


def settled(group: object) -> tuple[str, str | None, str | None]:
    """On a machine where only some ranks have bf16, and a faster oneDNN."""
    patch = pytest.MonkeyPatch()
    trainer = make_trainer(group, recipe=AUTO)
    with patch.context() as only_here:
        first = trainer.ranks.is_first
        has(only_here, "AMX" if first else None, "onednn" if first else "torch")
        return trainer.numerics.settle(), trainer.numerics.precision, trainer.numerics.library


def test_all_ranks_choose_alike(ranks: Any) -> None:
    for said, precision, library in ranks.run(3, settled):
        assert (precision, library) == ("fp32", "torch")
        assert said.startswith("precision fp32 (2 of 3 ranks have no instructions for bf16)")


def test_torch_s_optimizers_are_fused_unless_the_recipe_says_otherwise() -> None:
    trained = [nn.Parameter(torch.ones(2))]
    adam = Component(class_path="torch.optim.Adam", init_args={"lr": 0.1})
    assert fuse_optimizer(adam, trained).init_args == {"lr": 0.1, "fused": True}
    for given in ({"fused": False}, {"foreach": True}, {"differentiable": True}):
        component = Component(class_path="torch.optim.Adam", init_args=given)
        assert fuse_optimizer(component, trained) is component
    for others in ("torch.optim.Rprop", "torch.optim.SGD"):
        component = Component(class_path=others, init_args={"lr": 0.1})
        assert fuse_optimizer(component, trained) is component
    untrained = torch.ones(2, device="meta"), torch.ones(2, 3).T, torch.ones(2, dtype=torch.int64)
    for cannot in (*([*trained, other] for other in untrained), []):
        assert fuse_optimizer(adam, cannot) is adam


# -- float16 and TF32 ---------------------------------------------------------------------------------------------


def made(**options: Any) -> Trainer:
    """A trainer of the planted model, in a precision."""
    return planted.trainer(replace(TrainRecipe(batch_size=64, device="cpu"), **options))


def values_of(trainer: Trainer) -> list[Tensor]:
    return [t.clone() for t in trainer.model.state_dict().values()]


def test_float16_trains_with_a_scaled_loss_as_float32_does() -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("fp32", "fp16"):
        if precision == "fp16":
            assert dtype_of_products(made(precision=precision, steps=8)) == torch.float16
        trainer = made(precision=precision, steps=8)
        trainer.callbacks.append(kept := planted.Losses())
        trainer.fit(planted.batches(8))
        losses[precision] = kept.losses
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.02)


@pytest.mark.parametrize("clip_grad_norm", [None, 0.1])
def test_a_gradient_that_overflows_float16_touches_nothing_and_lowers_the_scale(clip_grad_norm: float | None) -> None:
    trainer = made(precision="fp16", steps=1, clip_grad_norm=clip_grad_norm)
    trainer.numerics.settle()
    assert trainer.numerics.scaler is not None
    trainer.numerics.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = values_of(trainer)
    trainer.fit(planted.batches(1))
    assert all(map(torch.equal, before, values_of(trainer)))
    assert trainer.numerics.scaler.get_scale() == 2.0**39
    assert trainer.step == 1


def test_a_resumed_run_goes_on_with_its_scale() -> None:
    first = made(precision="fp16", steps=2)
    first.numerics.settle()
    first.numerics.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    first.fit(planted.batches(2))
    state = first.numerics.state_dict()
    assert state["scale"]["scale"] == 32.0
    assert state["scale"]["_growth_tracker"] == 2
    again = made(precision="fp16")
    again.numerics.load_state_dict(state)
    again.numerics.settle()
    assert again.numerics.state_dict()["scale"] == state["scale"]


def test_tf32_is_of_gpus() -> None:
    with pytest.raises(RecipeError, match=r"train.precision is tf32"):
        made(precision="tf32", steps=1).fit(planted.batches(1))


def test_tf32_is_asked_of_torch_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    has(monkeypatch, "bf16 tensor cores")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    for precision in ("tf32", "fp32"):
        trainer = made(precision=precision)
        trainer.numerics._device = torch.device("cuda")
        trainer.numerics.settle()
    assert asked == ["high", "highest"]


def test_float16_refuses_sharded_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "is_sharded", lambda _: True)
    with pytest.raises(RecipeError, match=r"precision is fp16, but with parallel.dense fsdp"):
        made(precision="fp16").numerics.settle()
