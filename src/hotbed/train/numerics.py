"""Choose the device, precision and matrix library of a model, and explain losses that are not finite.

The matrix library computes the products of linear layers on CPUs (oneDNN, or torch's default library). `auto` values
are resolved when training starts, equally on all ranks. The choices change the bits of results. So checkpoints store
the choices, and a run that is resumed on a different machine uses the same precision and library.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.config import Precision, TrainRecipe
from hotbed.embed import collections_of
from hotbed.embed.dense_parallel import is_sharded, local_values
from hotbed.errors import NonFiniteError, RecipeError
from hotbed.machine import cpu
from hotbed.nn import DLRM, DCNv2, DeepFM, MMoE, TwoTower, WideDeep
from hotbed.nn.linear import CastWeights, Linear, faster_library
from hotbed.nn.loss import SummedLoss, summed_cross_entropy
from hotbed.nn.normalization import normalization_of
from hotbed.torch_private import has_onednn_linear
from hotbed.train.metrics import checked_logits
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.retrieval import Retrieval, RetrievalBatch

Library = Literal["torch", "onednn"]

_log = logging.getLogger("hotbed")
AUTOCAST: dict[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes that torch.autocast uses for the precisions bf16 and fp16."""
_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ``ONEDNN_MAX_CPU_ISA`` that disable oneDNN's bfloat16 instructions."""


def resolve_device(device: str, option: str = "train.device") -> torch.device:
    """Return the device for the value ``device`` of an option; ``auto`` is CUDA if this machine has a CUDA device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"{option} is cuda, but torch finds no CUDA device. Set it to auto or cpu")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())  # numbered, because threads can differ in their device
    return torch.device(device.replace("auto", "cpu"))


def bf16_instructions(device: torch.device) -> str | None:
    """Return the name of a device's instructions for bfloat16 products, or None if such products are emulated.

    Emulated products are 4 to 60 times slower than float32 products. With instructions, bfloat16 products are mostly 1
    to 3 times faster than float32 products (`python -m benchmarks.ablation --isa`).
    """
    if device.type == "cuda":
        return "bf16 tensor cores" if torch.cuda.is_bf16_supported(including_emulation=False) else None
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if not torch.backends.mkldnn.is_available() or most in _WITHOUT_BF16:
        return None  # because torch computes bfloat16 products with oneDNN
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "Arm BF16"}
    return next((name for flag, name in names.items() if flag in cpu().flags), None)


def is_one_graph(model: nn.Module) -> bool:
    """Return whether ``torch.compile`` must capture the model in one graph, so that a graph break is an error.

    This is true for hotbed's models of pooled features if all tables are on this rank. Other models may break graphs.
    """
    own = isinstance(model, DLRM | DCNv2 | DeepFM | MMoE | TwoTower | WideDeep) and normalization_of(model) is None
    return own and all(collection.is_traceable for collection in collections_of(model).values())


class Numerics:
    """Choose the precision and matrix library of a run, and compute its loss."""

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
        # precision and library are None until `settle` chooses them
        self.precision: Precision | None = None if recipe.precision == "auto" else recipe.precision
        # Library of float32 products of `hotbed.nn.linear.Linear` on CPUs
        self.library: Library | None = None if recipe.linear_library == "auto" else recipe.linear_library
        self._cast: CastWeights | None = None
        self.scaler: torch.amp.GradScaler | None = None  # scales the loss if gradients are float16; else None
        self._scale: dict[str, Any] = {}
        self.why = "the recipe"  # where the precision comes from, for messages

    def settle(self) -> str:
        """Resolve ``auto`` values equally on all ranks, and return a text that explains the choices.

        bfloat16 is chosen if all ranks have instructions for it. oneDNN is chosen if it is faster on all ranks' CPUs.
        """
        device, instructions = self._device.type.upper(), bf16_instructions(self._device)
        with_bf16, with_onednn, without_onednn = self._ranks.add(
            instructions is not None, faster_library() == "onednn", not has_onednn_linear()
        )
        ranks = self._ranks.size
        if self.precision is None:
            self.precision = "bf16" if with_bf16 == ranks else "fp32"
            self.why = f"this {device} has {instructions}"
            if self.precision == "fp32":
                lacking = f"this {device} has" if ranks == 1 else f"{ranks - int(with_bf16)} of {ranks} ranks have"
                self.why = f"{lacking} no instructions for bf16"
        elif self.precision == "bf16" and instructions is None:
            _log.warning(
                "precision is bf16 (%s), but this %s has no bf16 instructions. Emulated products are 4 to 60 times "
                "slower than fp32. Set train.precision to fp32",
                self.why,
                device,
            )
        if self.library == "onednn" and without_onednn:
            _log.warning(
                "train.linear_library is onednn, but torch has no oneDNN on %d of %d ranks. All ranks use torch's own "
                "library, so results differ in their last bits",
                int(without_onednn),
                ranks,
            )
            self.library = "torch"
        self.library = self.library or ("onednn" if with_onednn == ranks else "torch")
        for layer in self._layers:
            layer.use(self.library)
        casts = not (self._recipe.compile or self._recipe.recompute)  # these read weights outside of the forward pass
        if device == "CUDA" and self.precision in AUTOCAST and ranks == 1 and casts:
            self._cast = CastWeights(self._model, AUTOCAST[self.precision])
        self._settle_products()
        chosen = f"precision {self.precision} ({self.why})"
        if self.precision == "fp32" and self._layers and device == "CPU":
            chosen += f"; matrix products by {'oneDNN' if self.library == 'onednn' else 'the library of torch'}"
        return chosen

    def _settle_products(self) -> None:
        """Set how torch rounds float32 products on GPUs, and create the loss scaler for fp16."""
        if self._device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        elif self.precision == "tf32":
            raise RecipeError("train.precision is tf32, which only GPUs support. Set it to fp32 or bf16 on a CPU")
        if self.precision != "fp16":
            return
        if any(map(is_sharded, self._model.parameters())):
            raise RecipeError(
                "train.precision is fp16, but with parallel.dense fsdp a rank cannot detect overflows on other ranks. "
                "Set train.precision to bf16, or parallel.dense to ddp"
            )
        if self.scaler is None:
            self.scaler = torch.amp.GradScaler(self._device.type)
        if self._scale:
            self.scaler.load_state_dict(self._scale)
            self._scale = {}

    @property
    def is_retrieval(self) -> bool:
        """Whether the loss is a `Retrieval`."""
        return isinstance(self._loss, Retrieval)

    def prepare(self, batches: Iterable[Batch], step: int) -> Iterator[Batch]:
        """If the loss is a `Retrieval`, add candidates to each batch. The first batch is for the step number ``step``.

        Ids are exchanged later, so that the ids of the candidates are exchanged, too.
        """
        for batch in batches:
            yield self._loss.prepare(batch, step) if isinstance(self._loss, Retrieval) else batch
            step += 1

    def autocast(self) -> torch.autocast:
        """Return the context of forward passes in the chosen precision. Weights are cast once per outermost context."""
        dtype = AUTOCAST.get(self.precision, torch.bfloat16)
        return torch.autocast(self._device.type, dtype, enabled=self.precision in AUTOCAST)

    def summed_losses(self, batches: Iterable[Batch], *, counts: bool = True) -> tuple[list[Tensor], int]:
        """Return Σ weight · loss of each virtual rank's batch in the chosen precision, and the number of tasks.

        The loss of an ensemble is the mean over its members. For ``counts`` see `Retrieval.__call__`.
        """
        if isinstance(self._loss, Retrieval):
            return self._retrieval_losses(self._loss, batches, counts=counts), 1
        losses, tasks = list[Tensor](), 0
        for batch in batches:
            with self._in_precision():
                logits, labels = checked_logits(self._model(batch), batch.labels, training=True)
            loss, tasks = self._loss(logits.float(), labels, batch.weights_by_label), labels.shape[-1]
            losses.append(loss if logits.ndim == 2 else loss / len(logits))
        return losses, tasks

    def _retrieval_losses(self, loss: Retrieval, batches: Iterable[Batch], *, counts: bool) -> list[Tensor]:
        """Compute all vectors before the losses, because each loss compares users with the items of all."""
        own, vectors = list[Batch](), list[tuple[Tensor, Tensor]]()
        for batch in batches:
            assert isinstance(batch, RetrievalBatch)
            with self._in_precision():
                vectors.append(self._model(batch, vectors=True, users=batch.rows))
            own.append(batch)
        with self._in_precision():
            return loss(vectors, own, counts=counts)

    @contextmanager
    def _in_precision(self) -> Generator[None]:
        """Run forward passes in the chosen precision."""
        with nullcontext() if self._cast is None else self._cast.used(), self.autocast():
            yield

    def non_finite_error(self, loss: float, own: Tensor, batch: Batch, which: str, step_name: str) -> NonFiniteError:
        """Return an error for a loss that is not finite, with the likely cause and a fix.

        ``loss`` is the loss of all ranks, and ``own`` is the loss of this rank's samples. ``which`` and ``step_name``
        name the batch and the step in the message.
        """
        cause = "The cause is on a different rank; see that rank's log"
        if not math.isfinite(own.item()) or self._ranks.size == 1:
            cause = _cause_of_non_finite(batch, which, self._model)
        return NonFiniteError(
            f"the loss is {loss} in {step_name}, expected a finite number. Training stopped before this batch updated "
            f"any parameter or table. {cause}"
        )

    def summary(self) -> dict[str, str | int | None]:
        """Return the precision, the reason for it, the matrix library, and the number of compute threads."""
        return {
            "precision": self.precision,
            "precision_because": self.why,
            "linear_library": self.library if self._device.type == "cpu" else None,
            "threads": torch.get_num_threads(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the precision, the matrix library and the processor. With fp16, add the state of the loss scaler."""
        scale = {} if self.scaler is None else {"scale": self.scaler.state_dict()}
        chosen = {"precision": self.precision, "linear_library": self.library}
        return {**chosen, "processor": _processor(self._device), **scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's choices, unless the recipe overrides them.

        Warn if the bits of results will differ from an uninterrupted run.
        """
        for name in ("precision", "linear_library"):
            if state[name] is not None and getattr(self._recipe, name) not in ("auto", state[name]):
                _log.warning(
                    "train.%s was %s and is now %s, so bits will differ from an uninterrupted run. Set it to auto to "
                    "keep the old value",
                    name,
                    state[name],
                    getattr(self._recipe, name),
                )
        if self._recipe.precision == "auto":
            self.precision, self.why = state["precision"], "the checkpoint"
        if self._recipe.linear_library == "auto":
            self.library = state["linear_library"]
        self._scale = dict(state.get("scale") or {})
        processor = _processor(self._device)
        if self._ranks.is_first and state["processor"] != processor:  # checkpoints hold the first rank's processor
            _log.warning(
                "this run was started on %s and is resumed on %s. Their matrix products round differently, so bits "
                "will differ from an uninterrupted run",
                state["processor"],
                processor,
            )


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu().kind


def _cause_of_non_finite(batch: Batch, which: str, model: nn.Module) -> str:
    """Return the likely cause of a loss that is not finite, and a fix."""
    normalization, dense = normalization_of(model), batch.dense
    if normalization is not None and dense is not None:  # because normalization replaces missing values
        dense = normalization(dense)
    for field, tensor in (("dense", dense), ("weights", batch.weights)):
        index = _first_bad(tensor)
        if tensor is not None and index is not None:
            column = f", column {index[1]}" if len(index) > 1 else ""
            return (
                f"The cause is in the input: {field} of sample {index[0]:,} of {which}{column} is "
                f"{float(tensor[tuple(index)])}. Correct this value"
                + (", or set a rule for missing values of this column in the schema" if field == "dense" else "")
            )
    for name, parameter in model.named_parameters():
        if _first_bad(local_values(parameter)) is not None:
            return (
                f"The input is finite, but parameter '{name}' is not, because an earlier step diverged. Lower the "
                "learning rates, or raise schedule.warmup_steps"
            )
    return (
        "The input and the dense parameters are finite, so values inside the model overflow. Lower the learning rates, "
        "raise schedule.warmup_steps, or set train.precision to fp32"
    )


def _first_bad(tensor: Tensor | None) -> list[int] | None:
    """Return the index of a tensor's first entry that is not finite, or None."""
    if tensor is None or bool(tensor.isfinite().all()):
        return None
    return (~tensor.detach().isfinite()).nonzero()[0].tolist()
