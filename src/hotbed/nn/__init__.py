"""Layers and models around embedding collections."""

from hotbed.nn.layers import MLP, DotInteraction
from hotbed.nn.models import DLRM, WideDeep

__all__ = ["DLRM", "MLP", "DotInteraction", "WideDeep"]
