"""Choose on which device, in which precision and by which library a model is computed; explain losses that are NaN.

A recipe may leave both to the machine (``auto``). They are chosen once, when training starts, by all ranks alike, and
kept in the checkpoint: they decide bits, so a run that is resumed on another machine goes on with them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.config import Precision, TrainRecipe
from hotbed.embed import collections_of
from hotbed.embed.dense_shards import is_sharded, local_values
from hotbed.errors import NonFiniteError, RecipeError
from hotbed.machine import cpu
from hotbed.nn import DLRM, DCNv2, DeepFM, MMoE, TwoTower, WideDeep
from hotbed.nn.cast_weights import CastWeights
from hotbed.nn.linear import Linear, faster_library
from hotbed.nn.loss import SummedLoss, summed_cross_entropy
from hotbed.nn.normalization import normalization_of
from hotbed.torch_private import has_onednn_linear
from hotbed.train.metrics import checked_logits
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.retrieval import Retrieval

Library = Literal["torch", "onednn"]

_log = logging.getLogger("hotbed")
AUTOCAST: dict[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of autocast by precision."""
_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of oneDNN's ``ONEDNN_MAX_CPU_ISA`` under which it leaves instructions for bfloat16 alone."""


def resolve_device(device: str, option: str = "train.device") -> torch.device:
    """Return the device that ``option`` of a recipe or command line names; ``auto`` is CUDA where there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"{option} is cuda, but torch finds no CUDA device here; use auto or cpu")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())  # with its number: what is current, each thread has
    return torch.device(device.replace("auto", "cpu"))


def bf16_instructions(device: torch.device) -> str | None:
    """Name the instructions that a device has for products in bfloat16; None where they would be emulated.

    Emulated products are 2 to 60 times slower than float32 ones, those by instructions mostly 1 to 3 times faster
    (`python -m benchmarks.ablation --isa`).
    """
    if device.type == "cuda":
        return "bf16 tensor cores" if torch.cuda.is_bf16_supported(including_emulation=False) else None
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if not torch.backends.mkldnn.is_available() or most in _WITHOUT_BF16:
        return None  # torch computes these products by oneDNN, which must be there and may use the instructions
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "Arm BF16"}
    return next((name for flag, name in names.items() if flag in cpu().flags), None)


def is_one_graph(model: nn.Module) -> bool:
    """Whether ``torch.compile`` gets all of a model into one graph, so that a graph break would be a defect.

    This is so for hotbed's models of pooled features whose tables are all on this rank. Other models may do what no
    graph can hold; torch cuts their graphs there.
    """
    own = isinstance(model, DLRM | DCNv2 | DeepFM | MMoE | TwoTower | WideDeep) and normalization_of(model) is None
    return own and all(collection.is_traceable for collection in collections_of(model).values())


class Numerics:
    """Choose the precision and the matrix library of a run once."""

    def __init__(
        self,
        model: nn.Module,
        recipe: TrainRecipe,
        device: torch.device,
        ranks: Ranks,
        loss: SummedLoss | Retrieval = summed_cross_entropy,
    ) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, Linear) and m.library == "auto"]
        self._model, self._recipe, self._device, self._ranks = model, recipe, device, ranks
        self._loss = loss
        # precision and library are None until they are chosen
        self.precision: Precision | None = None if recipe.precision == "auto" else recipe.precision
        # library of float32 products of `hotbed.nn.linear.Linear` on CPUs
        self.library: Library | None = None if recipe.linear_library == "auto" else recipe.linear_library
        self._cast: CastWeights | None = None
        self.scaler: torch.amp.GradScaler | None = None  # scales the loss if gradients are float16; else None
        self._scale: dict[str, Any] = {}
        self.why = "the recipe"  # reason for the precision

    def settle(self) -> str:
        """Resolve what is still ``auto``, equally on all ranks, and say what was chosen and why.

        bfloat16 is chosen if all ranks have instructions for it, and oneDNN if it is faster on all ranks' CPUs.
        """
        kind, instructions = self._device.type.upper(), bf16_instructions(self._device)
        with_bf16, with_onednn, without_onednn = self._ranks.add(
            instructions is not None, faster_library() == "onednn", not has_onednn_linear()
        )
        ranks = self._ranks.size
        if self.precision is None:
            self.precision = "bf16" if with_bf16 == ranks else "fp32"
            self.why = f"this {kind} has {instructions}"
            if self.precision == "fp32":
                lacking = f"this {kind} has" if ranks == 1 else f"{ranks - int(with_bf16)} of {ranks} ranks have"
                self.why = f"{lacking} no instructions for bf16"
        elif self.precision == "bf16" and instructions is None:
            _log.warning(
                "precision is bf16 (%s), but this %s has no instructions for it: products are emulated, which is 2 to "
                "60 times slower than fp32; set train.precision fp32",
                self.why,
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
        casts = not (self._recipe.compile or self._recipe.recompute)  # which ask for weights at other times
        if kind == "CUDA" and self.precision in AUTOCAST and ranks == 1 and casts:
            self._cast = CastWeights(self._model, AUTOCAST[self.precision])
        self._settle_products()
        chosen = f"precision {self.precision} ({self.why})"
        if self.precision == "fp32" and self._layers and kind == "CPU":
            chosen += f"; matrix products by {'oneDNN' if self.library == 'onednn' else 'the library of torch'}"
        return chosen

    def _settle_products(self) -> None:
        """Tell torch how to round the products of float32, or begin to scale the loss."""
        if self._device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        elif self.precision == "tf32":
            raise RecipeError("train.precision is tf32, whose products only GPUs have; use fp32 or bf16 on a CPU")
        if self.precision != "fp16":
            return
        if any(map(is_sharded, self._model.parameters())):
            raise RecipeError(
                "train.precision is fp16, but parallel.dense is fsdp, whose ranks would not see each other's "
                "overflows; use bf16, or parallel.dense ddp"
            )
        if self.scaler is None:
            self.scaler = torch.amp.GradScaler(self._device.type)
        if self._scale:
            self.scaler.load_state_dict(self._scale)
            self._scale = {}

    @property
    def is_retrieval(self) -> bool:
        """Whether a model is trained to find items, see `Retrieval`."""
        return isinstance(self._loss, Retrieval)

    def prepared(self, batches: Iterable[Batch], step: int) -> Iterator[Batch]:
        """Add to the batches of a step and of those after it what the loss needs besides, before ids are exchanged."""
        for batch in batches:
            yield self._loss.prepared(batch, step) if isinstance(self._loss, Retrieval) else batch
            step += 1

    def summed_loss(self, batch: Batch, *, counts: bool = True) -> tuple[Tensor, int]:
        """Compute Σ weight · loss of a batch in the chosen precision, and the number of tasks.

        Of an ensemble, whose members give logits of their own, it is the mean of theirs. ``counts`` is as `Retrieval`
        has it.
        """
        cast = nullcontext() if self._cast is None else self._cast.used()
        dtype = AUTOCAST.get(self.precision, torch.bfloat16)
        with cast, torch.autocast(self._device.type, dtype, enabled=self.precision in AUTOCAST):
            if isinstance(self._loss, Retrieval):
                return self._loss(self._model, batch, counts=counts), 1
            logits, labels = checked_logits(self._model(batch), batch.labels, training=True)
        loss = self._loss(logits.float(), labels, batch.weights_by_label)
        return loss if logits.ndim == 2 else loss / len(logits), labels.shape[-1]

    def non_finite_error(self, loss: float, own: Tensor, batch: Batch, which: str, place: str) -> NonFiniteError:
        """Make the error for a loss that is not finite: where it happened, the likely cause and what to try.

        ``loss`` is that of all ranks, ``own`` is finite where this rank's samples are not to blame; ``which`` names the
        batch, ``place`` the step.
        """
        cause = "The samples of another rank did this, whose own message says how"
        if not math.isfinite(own.item()) or self._ranks.size == 1:
            cause = _cause_of_non_finite(batch, which, self._model)
        return NonFiniteError(
            f"the loss is {loss} in {place}; training stopped before the batch touched any parameter or table. {cause}"
        )

    def summary(self) -> dict[str, str | int | None]:
        """What was chosen, why, and how many threads of this process compute."""
        return {
            "precision": self.precision,
            "precision_because": self.why,
            "linear_library": self.library if self._device.type == "cpu" else None,
            "threads": torch.get_num_threads(),
        }

    def state_dict(self) -> dict[str, Any]:
        """What was chosen, and on what; of float16 the scale of the loss."""
        scale = {} if self.scaler is None else {"scale": self.scaler.state_dict()}
        chosen = {"precision": self.precision, "linear_library": self.library}
        return {**chosen, "processor": _processor(self._device), **scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a run was trained with, unless the recipe says otherwise; say what will change bits."""
        for name in ("precision", "linear_library"):
            if state[name] is not None and getattr(self._recipe, name) not in ("auto", state[name]):
                _log.warning(
                    "train.%s was %s and is now %s: from here on the bits differ from those of a run that was not "
                    "stopped; auto keeps what it was",
                    name,
                    state[name],
                    getattr(self._recipe, name),
                )
        if self._recipe.precision == "auto":
            self.precision, self.why = state["precision"], "the checkpoint"
        if self._recipe.linear_library == "auto":
            self.library = state["linear_library"]
        self._scale = dict(state.get("scale") or {})
        here = _processor(self._device)
        if self._ranks.is_first and state["processor"] != here:  # whose processor was kept
            _log.warning(
                "this run began on %s and goes on on %s: matrix products round otherwise there, so bits differ from "
                "those of a run that was not stopped",
                state["processor"],
                here,
            )


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu().kind


def _cause_of_non_finite(batch: Batch, which: str, model: nn.Module) -> str:
    """Say why the loss of a batch is NaN or infinite, and what to try; ``which`` names the batch."""
    normalization, dense = normalization_of(model), batch.dense
    if normalization is not None and dense is not None:  # which may have a rule for what is missing
        dense = normalization(dense)
    for what, tensor in (("dense", dense), ("weights", batch.weights)):
        place = _first_bad(tensor)
        if tensor is not None and place is not None:
            column = f", column {place[1]}" if len(place) > 1 else ""
            return (
                f"The cause is in the input: {what} of sample {place[0]:,} of {which}{column} is "
                f"{float(tensor[tuple(place)])}. Mend the data"
                + (", or give the column a rule for missing values in the schema" if what == "dense" else "")
            )
    for name, parameter in model.named_parameters():
        if _first_bad(local_values(parameter)) is not None:
            return (
                f"The input is finite but parameter '{name}' is not: an earlier step diverged. Try a lower lr, or a "
                f"longer schedule.warmup_steps"
            )
    return (
        "The input and the dense parameters are finite, so values inside the model overflow. Try a lower lr of the "
        "sparse or dense optimizer, a longer schedule.warmup_steps, or train.precision fp32"
    )


def _first_bad(tensor: Tensor | None) -> list[int] | None:
    """Index of the first entry that is not finite."""
    if tensor is None or bool(tensor.isfinite().all()):
        return None
    return (~tensor.detach().isfinite()).nonzero()[0].tolist()
