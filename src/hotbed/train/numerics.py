"""`Numerics`: in which precision, and by which library, a run computes its dense part.

A recipe may leave both to the machine (``auto``). They are chosen once, when training starts, by all ranks alike, and
kept in the checkpoint: they decide bits, so a run that is resumed on another machine goes on with them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from hotbed.config import Precision, TrainRecipe
from hotbed.machine import cpu
from hotbed.nn.linear import Linear, faster_library, has_onednn_linear
from hotbed.train.parallel import Ranks

Library = Literal["torch", "onednn"]

_log = logging.getLogger("hotbed")


def bf16_instructions(device: torch.device) -> str | None:
    """Name the instructions that a device has for products in bfloat16; None where they would be emulated.

    Emulated products are many times slower than float32 ones.
    """
    if device.type == "cuda":
        return "bf16 tensor cores" if torch.cuda.is_bf16_supported(including_emulation=False) else None
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "Arm BF16"}
    return next((name for flag, name in names.items() if flag in cpu().flags), None)


class Numerics:
    """Precision and library of a run.

    Parameters
    ----------
    model
        The model that is trained.
    recipe
        What is asked for.
    device
        Where it is trained.
    ranks
        All of them must call `settle`.

    Attributes
    ----------
    precision
        ``"fp32"`` or ``"bf16"``; None until it is settled.
    library
        Library of float32 products of `hotbed.nn.linear.Linear` on CPUs; None until it is settled.
    unrecorded
        Precision of checkpoints that do not say theirs: that of their recipe, which the caller knows.
    """

    def __init__(self, model: nn.Module, recipe: TrainRecipe, device: torch.device, ranks: Ranks) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, Linear) and m.library == "auto"]
        self._recipe, self._device, self._ranks = recipe, device, ranks
        self.precision: Precision | None = None if recipe.precision == "auto" else recipe.precision
        self.library: Library | None = None if recipe.linear_library == "auto" else recipe.linear_library
        self._why = "the recipe"
        self.unrecorded: Precision = "fp32"

    def settle(self) -> str:
        """Choose what is left to choose, alike on all ranks, and say what was chosen and why.

        bfloat16 is chosen if all ranks have instructions for it, and oneDNN if it is faster on all ranks' CPUs.
        """
        kind, instructions = self._device.type.upper(), bf16_instructions(self._device)
        with_bf16, with_onednn, without_onednn = self._ranks.add(
            instructions is not None, faster_library() == "onednn", not has_onednn_linear()
        )
        ranks = self._ranks.size
        if self.precision is None:
            self.precision = "bf16" if with_bf16 == ranks else "fp32"
            self._why = f"this {kind} has {instructions}"
            if self.precision == "fp32":
                lacking = f"this {kind} has" if ranks == 1 else f"{ranks - int(with_bf16)} of {ranks} ranks have"
                self._why = f"{lacking} no instructions for bf16"
        elif self.precision == "bf16" and instructions is None:
            _log.warning(
                "precision is bf16 (%s), but this %s has no instructions for it: products are emulated, which can be "
                "30 times slower than fp32; set train.precision fp32",
                self._why,
                kind,
            )
        if self.library == "onednn" and without_onednn:
            _log.warning(
                "train.linear_library was to be onednn, which torch lacks on %d of %d ranks: all use torch's own "
                "library, and results differ in their last bits",
                int(without_onednn),
                ranks,
            )
            self.library = "torch"
        self.library = self.library or ("onednn" if with_onednn == ranks else "torch")
        for layer in self._layers:
            layer.use(self.library)
        chosen = f"precision {self.precision} ({self._why})"
        if self.precision == "fp32" and self._layers and kind == "CPU":
            chosen += f"; matrix products by {'oneDNN' if self.library == 'onednn' else 'the library of torch'}"
        return chosen

    def state_dict(self) -> dict[str, str | None]:
        """What was chosen, and on what."""
        return {"precision": self.precision, "linear_library": self.library, "processor": _processor(self._device)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a run was trained with, unless the recipe says otherwise; say what will change bits."""
        # What there was before a run could choose, for checkpoints that do not say.
        before: dict[str, Any] = {
            "precision": self.unrecorded,
            "linear_library": "torch",
            **{k: v for k, v in state.items() if v is not None},
        }
        for name in ("precision", "linear_library"):
            if getattr(self._recipe, name) not in ("auto", before[name]):
                _log.warning(
                    "train.%s was %s and is now %s: from here on the bits differ from those of a run that was not "
                    "stopped; auto keeps what it was",
                    name,
                    before[name],
                    getattr(self._recipe, name),
                )
        if self._recipe.precision == "auto":
            self.precision, self._why = before["precision"], "the checkpoint"
        if self._recipe.linear_library == "auto":
            self.library = before["linear_library"]
        here = _processor(self._device)
        if self._ranks.is_first and before.get("processor", here) != here:  # whose processor was kept
            _log.warning(
                "this run began on %s and goes on on %s: matrix products round otherwise there, so bits differ from "
                "those of a run that was not stopped",
                before["processor"],
                here,
            )


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu().kind
