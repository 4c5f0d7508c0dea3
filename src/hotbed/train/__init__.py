"""Train models: the loop, its callbacks, metrics and reports."""

from hotbed.train.metrics import Metrics, evaluate
from hotbed.train.trainer import Callback, Trainer

__all__ = ["Callback", "Metrics", "Trainer", "evaluate"]
