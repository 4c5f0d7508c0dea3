"""Save and load checkpoints, under any plan, number of ranks and tier; see docs/checkpoint-format.md.

- The format: `manifest`, `tensor_files` and `blocks`.
- Save: `contents` and `snapshot` collect the tensors. `save` writes them, and `differential` writes only changed rows.
- Load: `load`, `saved_tables`, and `warm_start` for a new model that starts with rows of an earlier one.
- Convert: `convert`, `changes` for servers, `hotbed.checkpoint.importers` for files of other libraries, `export_dcp`.
- Directories on local disks and in object stores: `storage`.
"""

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
