"""Training: the loop, its callbacks, metrics and reports."""

from hotbed.train.callbacks import Callback
from hotbed.train.metrics import Metrics, evaluate
from hotbed.train.trainer import Trainer

__all__ = ["Callback", "Metrics", "Trainer", "evaluate"]
