"""List the GPU kernels of the dense part of a step, with the operations and bytes of each kernel.

The list is for one process without ``train.compile``, which would fuse some kernels. `tests/census` compares the list
with the kernels of a step on a simulated device. A kernel of a matrix product reads its operands (and the bias, if it
is fused) from device memory and writes its result to device memory, each once.

Outside of `hotbed.nn.MLP`, `hotbed.nn.CrossLayer` and `hotbed.nn.DotInteraction`, only matrix products are listed. So
models with attention or histories take longer than estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import nn

from hotbed.embed import collections_of
from hotbed.nn.cross import CrossLayer
from hotbed.nn.layers import MLP, DotInteraction
from hotbed.nn.linear import Linear
from hotbed.plan.tiling import Tier
from hotbed.plan.workload import Kernel

PRODUCTS, BACKWARD_PRODUCTS = "products", "products, backward"
ACTIVATIONS, BACKWARD_ACTIVATIONS, BIASES = "activations", "activations, backward", "gradients of biases"
INTERACTION, BACKWARD_INTERACTION = "interaction", "interaction, backward"
CASTS, LOSS, OPTIMIZER = "casts and copies", "loss", "dense optimizer"

ARENA_LAUNCHES, EXCHANGED_ARENA_LAUNCHES = 19, 100
"""Kernel launches per step for an arena in device memory with RowWiseAdagrad: for one rank, and for several ranks."""
HOST_LAUNCHES, CACHED_LAUNCHES = 64 + 3, 204 + 7
"""Additional launches for an arena in a slower tier: without, and with a cache on the device.

The second summand is the number of host synchronizations. Each counts as a launch, because the device is idle until the
next launch."""
OPTIMIZER_BYTES = 28
"""Bytes that Adam moves per dense parameter: it reads parameter, gradient and two moments, and writes all but the
gradient."""


def arena_launches(ranks: int = 1, *, cached: bool = False) -> dict[Tier, int]:
    """Return the number of kernel launches per step of one arena, for each tier in which the arena may be.

    With ``cached``, an arena in host memory or on disk has a cache.
    """
    device = ARENA_LAUNCHES if ranks == 1 else EXCHANGED_ARENA_LAUNCHES
    slower = device + (CACHED_LAUNCHES if cached else HOST_LAUNCHES)
    return {"device": device, "host": slower, "disk": slower}


def dense_kernels(
    model: nn.Module, *, narrow: bool, dense_inputs: int, labels: int, casts_once: bool = True
) -> tuple[Kernel, ...]:
    """Return the kernels of the dense part of a step.

    ``narrow`` means bf16 or fp16. With ``casts_once``, one kernel casts all weights. ``dense_inputs`` and ``labels``
    are numbers of columns.
    """
    size = 2 if narrow else 4
    kernels = [*_products(model, size, dense_inputs), *_activations(model, size), *_vectors(model, size)]
    if narrow:
        kernels += _casts(model, dense_inputs, labels, casts_once)
    kernels += [
        Kernel(part=LOSS, op="_cross_entropy_kernel", sample_bytes=12.0 * labels),
        Kernel(part=LOSS, op="_total_kernel"),
        Kernel(part=LOSS, op="mul", sample_bytes=8.0 * labels, step_bytes=4),
        Kernel(part=LOSS, op="sub", step_bytes=12),  # check for a finite loss
        Kernel(part=LOSS, op="logical_xor", step_bytes=28),
    ]
    count = sum(p.numel() for p in model.parameters())
    return (*kernels, Kernel(part=OPTIMIZER, op="_fused_sgd_", step_bytes=float(OPTIMIZER_BYTES * count)))


def _products(model: nn.Module, size: int, dense_inputs: int) -> Iterator[Kernel]:
    """Yield the kernels of matrix products and of the gradients of biases; a value has ``size`` bytes."""
    counted, fused = 0, set(_before_relu(model))
    for layer in model.modules():
        if not isinstance(layer, nn.Linear):
            continue
        x, y, weight = layer.in_features, layer.out_features, layer.weight.numel()
        counted += weight
        both: dict[str, float] = {"flops": 2.0 * weight, "sample_bytes": float(size * (x + y))}
        bias = 0 if layer.bias is None else y  # pyright: ignore[reportUnnecessaryComparison]
        forward = float(size * (weight + bias))
        yield Kernel(part=PRODUCTS, op="addmm" if bias else "mm", step_bytes=forward, **both)
        products = 1 if x == max(dense_inputs, 1) else 2  # dense inputs need no gradient
        for _ in range(products):  # gradients of weight and input
            yield Kernel(part=BACKWARD_PRODUCTS, op="mm", step_bytes=float(size * weight), **both)
        if layer in fused:
            yield Kernel(part=BIASES, op="_add_parts_kernel", step_bytes=float(size * y))
        elif bias:
            yield Kernel(part=BIASES, op="sum", sample_bytes=float(size * y), step_bytes=float(size * y))
    others = sum(p.numel() for p in model.parameters() if p.dim() >= 2) - counted
    if others:
        yield Kernel(part=PRODUCTS, op="bmm", flops=2.0 * others)
        yield from [Kernel(part=BACKWARD_PRODUCTS, op="bmm", flops=2.0 * others)] * 2


def _before_relu(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of MLPs that are followed by a ReLU."""
    for mlp in model.modules():
        if isinstance(mlp, MLP):
            yield from (layer for layer, each in pairwise(mlp) if type(layer) is Linear and type(each) is nn.ReLU)


def _activations(model: nn.Module, size: int) -> Iterator[Kernel]:
    """Yield the kernels of activations and dropout in MLPs, and of products and sums in cross layers."""

    def both(width: int, op: str, backward: str) -> Iterator[Kernel]:
        yield Kernel(part=ACTIVATIONS, op=op, sample_bytes=2.0 * size * width)
        yield Kernel(part=BACKWARD_ACTIVATIONS, op=backward, sample_bytes=3.0 * size * width)

    for module in model.modules():
        if isinstance(module, CrossLayer):
            passes = 3.0 * size * module.up.out_features  # each kernel reads two vectors and writes one
            yield from [Kernel(part=ACTIVATIONS, op=op, sample_bytes=passes) for op in ("mul", "add")]
            yield from [Kernel(part=BACKWARD_ACTIVATIONS, op=op, sample_bytes=passes) for op in ("mul", "mul", "add")]
        if not isinstance(module, MLP):
            continue
        width, is_fused, fused = 0, False, set(_before_relu(module))
        for child in module:
            if isinstance(child, nn.Linear):
                width, is_fused = child.out_features, child in fused
                continue
            for each in child if isinstance(child, nn.Sequential) else [child]:
                if isinstance(each, nn.Dropout):  # a value is read, and a value and a byte of the mask are written
                    mask = (2.0 * size + 1) * width
                    yield Kernel(part=ACTIVATIONS, op="native_dropout", sample_bytes=mask)
                    yield Kernel(part=BACKWARD_ACTIVATIONS, op="native_dropout_backward", sample_bytes=mask)
                elif isinstance(each, nn.ReLU):
                    yield from both(width, "relu_", "_relu_backward_kernel" if is_fused else "threshold_backward")
                else:
                    yield from both(width, "activation", "activation_backward")


def _vectors(model: nn.Module, size: int) -> Iterator[Kernel]:
    """Yield the kernels of dot interactions.

    For models without a dot interaction, yield the kernels that concatenate looked-up vectors with other inputs.
    """
    found = False
    for module in model.modules():
        if isinstance(module, DotInteraction):
            found = True
            n, d = module.vectors, module.dim
            flops, vectors, out = 2.0 * n * n * d, float(size * n * d), float(size * module.width)
            yield Kernel(part=CASTS, op="copy_", sample_bytes=2.0 * size * d)  # output of the bottom MLP
            yield Kernel(part=INTERACTION, op="_interaction_kernel", flops=flops, sample_bytes=vectors + out)
            yield Kernel(
                part=BACKWARD_INTERACTION,
                op="_interaction_backward_kernel",
                flops=flops,
                sample_bytes=2 * vectors + out,
            )
    values = sum(c.tables[f.table].dim for c in collections_of(model).values() for f in c.features)
    if not found and values:
        yield from [Kernel(part=CASTS, op=op, sample_bytes=2.0 * size * values) for op in ("cat", "copy_")]


def _casts(model: nn.Module, dense_inputs: int, labels: int, casts_once: bool) -> Iterator[Kernel]:
    """Yield the kernels that cast values to or from 16 bits.

    These values are weights and their gradients, dense inputs, and logits and their gradient.
    """
    parameters = [p.numel() for m in model.modules() if isinstance(m, Linear) for p in m.parameters()]
    if casts_once:
        yield from [Kernel(part=CASTS, op="_foreach_copy_", step_bytes=6.0 * sum(parameters))] * 2
    else:
        yield from [Kernel(part=CASTS, op="_to_copy", step_bytes=6.0 * count) for count in parameters * 2]
    if dense_inputs:
        yield Kernel(part=CASTS, op="_to_copy", sample_bytes=6.0 * dense_inputs)
    yield from [Kernel(part=CASTS, op="_to_copy", sample_bytes=6.0 * labels)] * 2
