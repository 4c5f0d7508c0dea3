"""Modules on ``meta`` get their values where they are to be."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hotbed.errors import SpecError


def materialize(model: nn.Module, device: torch.device) -> None:
    """Make what is on ``meta``, and move the rest."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and names.setdefault(id(parameter), name) != name:
            raise SpecError(
                f"'{name}' and '{names[id(parameter)]}' are one parameter on meta, which would become two; make the "
                "model on a device"
            )
    for path, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(t.is_meta for t in own):
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise SpecError(
                f"{path or 'the model'} ({type(module).__name__}) is on meta and has no reset_parameters(), so its "
                "parameters cannot be made; add one, or make the model on a device"
            )
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():
            for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                t.fill_(_unset(t.dtype))
        reset()
        for name, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if bool(_is_unset(t).any()):
                raise SpecError(
                    f"{path or 'the model'} ({type(module).__name__}) is on meta and its reset_parameters() does not "
                    f"fill '{name}'; let it, or make the model on a device"
                )
    model.to(device)


def _unset(dtype: torch.dtype) -> float | int:
    """What marks a value that nobody has set yet."""
    if dtype == torch.bool:
        return 0
    return torch.iinfo(dtype).min if not (dtype.is_floating_point or dtype.is_complex) else math.nan


def _is_unset(t: Tensor) -> Tensor:
    """Where a tensor still has the mark; of booleans that is not known."""
    if t.dtype == torch.bool:
        return torch.zeros_like(t)
    return t.isnan() if t.is_floating_point() or t.is_complex() else t == _unset(t.dtype)
