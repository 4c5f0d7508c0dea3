"""Provide sparse optimizers, which update only the table rows that a batch uses; see `hotbed.optim.base`."""

from hotbed.optim.adagrad import Adagrad, RowWiseAdagrad
from hotbed.optim.adam import LAMB, Adam, AdamW, PartialRowWiseAdam
from hotbed.optim.base import SparseOptimizer
from hotbed.optim.ftrl import FTRL
from hotbed.optim.rule import COMMON, Moment, Rule, SparseModule, Updater
from hotbed.optim.sgd import SGD
from hotbed.optim.table_groups import TableSelection

__all__ = [
    "COMMON",
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Moment",
    "PartialRowWiseAdam",
    "RowWiseAdagrad",
    "Rule",
    "SparseModule",
    "SparseOptimizer",
    "TableSelection",
    "Updater",
]
