"""Training: the loop, its callbacks, metrics, checkpoints and reports."""

from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.train.callbacks import Callback
from hotbed.train.metrics import Metrics, evaluate
from hotbed.train.trainer import Trainer

__all__ = ["Callback", "Metrics", "Trainer", "evaluate", "load_checkpoint", "save_checkpoint"]
