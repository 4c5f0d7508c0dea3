"""Codecs of the wire: sizes, error bounds, and that nothing that overflows is hidden."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotbed.ops.rows import Codec, decode, encode, encoded_bytes

ROUNDINGS = 4 * 2.0**-24
"""Of float32: the scale, the division, the product."""

every_codec = pytest.mark.parametrize("codec", get_args(Codec))


def bound(codec: Codec, x: Tensor) -> Tensor:
    """Largest error of each value, as the module's table says."""
    m, a = x.abs().amax(dim=1, keepdim=True), x.abs()
    relative, absolute = {
        "fp32": (0.0, 0.0 * m),
        "bf16": (2.0**-8, 2.0**-134 + 0.0 * m),
        "fp16": (2.0**-11, 2.0**-25 + 0.0 * m),
        "int8": (ROUNDINGS, m / 254 + 2.0**-119),
        "fp8": (2.0**-4 + ROUNDINGS, 2.0**-10 * m / 448 + 2.0**-117),
    }[codec]
    return relative * a + absolute


@every_codec
@given(
    values=st.lists(
        st.lists(
            st.floats(-65504, 65504, width=32) | st.floats(-(2.0**-120), 2.0**-120, width=32), min_size=5, max_size=5
        ),
        min_size=1,
        max_size=4,
    )
)
def test_errors_stay_within_the_stated_bound(codec, values):
    x = torch.tensor(values, dtype=torch.float32)
    found = decode(encode(x, codec), codec)
    assert ((found.double() - x.double()).abs() <= bound(codec, x.double()) * (1 + 1e-6)).all()


@every_codec
def test_the_bound_is_nearly_reached(codec):
    """It describes the codec, and is not just large."""
    x = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    error = (decode(encode(x, codec), codec) - x).abs()
    assert codec == "fp32" or (error / bound(codec, x)).max() > 0.9


@every_codec
@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (2, 129)])
def test_an_encoded_vector_has_the_stated_bytes(codec, shape):
    encoded = encode(torch.randn(shape), codec)
    assert encoded.dtype == torch.uint8 and encoded.shape == (shape[0], encoded_bytes(codec, shape[1]))
    assert decode(encoded, codec).shape == shape and decode(encoded, codec).dtype == torch.float32


@every_codec
def test_zeros_stay_zeros(codec):
    assert not decode(encode(torch.zeros(2, 4), codec), codec).any()


@every_codec
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_never_arrives_as_finite(codec, value):
    x = torch.tensor([[1.0, value], [1.0, 2.0]])
    found = decode(encode(x, codec), codec)
    assert not found[0, 1].isfinite()
    assert found[1].isfinite().all(), "other rows are not touched"
