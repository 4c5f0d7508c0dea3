"""Build models around embedding collections: layers, and click models of the literature."""

from hotbed.nn.layers import MLP, DotInteraction
from hotbed.nn.models import DLRM, WideDeep

__all__ = ["DLRM", "MLP", "DotInteraction", "WideDeep"]
