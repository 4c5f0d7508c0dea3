"""Provide layers and published recommendation models that use embedding collections."""

from hotbed.nn.attention import AttentionPooling, CausalAttention, Dice, SequentialTransduction
from hotbed.nn.cross import CrossLayer, CrossNetwork
from hotbed.nn.dcn import DCNv2
from hotbed.nn.deepfm import DeepFM
from hotbed.nn.din import DIN
from hotbed.nn.dlrm import DLRM
from hotbed.nn.ensemble import DLRMEnsemble
from hotbed.nn.experts import MixtureOfExperts
from hotbed.nn.factorization import FactorizationMachine, NumericalEmbedding
from hotbed.nn.histories import NextItem
from hotbed.nn.hstu import HSTU
from hotbed.nn.layers import MLP, DotInteraction
from hotbed.nn.mmoe import MMoE
from hotbed.nn.normalization import Normalization, normalize
from hotbed.nn.sampled_softmax import InBatchSoftmax, ItemFrequencies
from hotbed.nn.sasrec import SASRec
from hotbed.nn.two_tower import TwoTower
from hotbed.nn.wide_deep import WideDeep

__all__ = [
    "DIN",
    "DLRM",
    "HSTU",
    "MLP",
    "AttentionPooling",
    "CausalAttention",
    "CrossLayer",
    "CrossNetwork",
    "DCNv2",
    "DLRMEnsemble",
    "DeepFM",
    "Dice",
    "DotInteraction",
    "FactorizationMachine",
    "InBatchSoftmax",
    "ItemFrequencies",
    "MMoE",
    "MixtureOfExperts",
    "NextItem",
    "Normalization",
    "NumericalEmbedding",
    "SASRec",
    "SequentialTransduction",
    "TwoTower",
    "WideDeep",
    "normalize",
]
