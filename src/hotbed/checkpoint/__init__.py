"""Save and load checkpoints, under any plan, number of ranks and tier; see docs/checkpoint-format.md."""

from hotbed.checkpoint.contents import RandomState, Stateful
from hotbed.checkpoint.load import load_checkpoint, verify_checkpoint
from hotbed.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    checkpoints_in,
    find_checkpoint,
    read_manifest,
    runs_in,
)
from hotbed.checkpoint.save import Saving, save_checkpoint
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.warm_start import Taken, init_from

__all__ = [
    "MANIFEST",
    "Directory",
    "Manifest",
    "RandomState",
    "Saving",
    "Stateful",
    "Taken",
    "checkpoints_in",
    "directory",
    "find_checkpoint",
    "init_from",
    "load_checkpoint",
    "read_manifest",
    "runs_in",
    "save_checkpoint",
    "verify_checkpoint",
]
