"""Kernels of a new rule have the bits of its formula."""

from torch import nn

from hotbed.optim import Lion
from hotbed.testing.rule_contract import RuleContract


class TestLion(RuleContract):
    def make(self, model: nn.Module) -> Lion:
        return Lion(model, lr=0.01, weight_decay=0.1)
