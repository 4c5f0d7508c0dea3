"""Build models around embedding collections: layers, and click models of the literature."""

from hotbed.nn.dcn import CrossLayer, DCNv2
from hotbed.nn.ensemble import DLRMEnsemble
from hotbed.nn.experts import MixtureOfExperts
from hotbed.nn.layers import MLP, DotInteraction
from hotbed.nn.mmoe import MMoE
from hotbed.nn.models import DLRM, WideDeep
from hotbed.nn.normalization import Normalization, normalize

__all__ = [
    "DLRM",
    "MLP",
    "CrossLayer",
    "DCNv2",
    "DLRMEnsemble",
    "DotInteraction",
    "MMoE",
    "MixtureOfExperts",
    "Normalization",
    "WideDeep",
    "normalize",
]
