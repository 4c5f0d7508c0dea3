"""facebookresearch/dlrm: what ``dlrm_s_pytorch.py --save-model`` writes, a ``.pt`` file with a ``state_dict``.

Tables are ``emb_l.I.weight``, layers ``bot_l.2K`` and ``top_l.2K``; the interaction is hotbed's, without padding. The
model gives probabilities where hotbed's gives logits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hotbed.checkpoint.importers.arrays import PeerArray, load_pt
from hotbed.checkpoint.importers.dlrm import Layer, dlrm_layers
from hotbed.checkpoint.importers.peer import PeerModel, named
from hotbed.errors import CheckpointError


def read_facebook(path: Path, names: Sequence[str] | None) -> PeerModel:
    """Tables and layers of a file; see `hotbed.checkpoint.importers.import_checkpoint`."""
    saved = load_pt(path, _numpy_scalars())
    state = saved.get("state_dict") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} has no 'state_dict'; name what dlrm_s_pytorch.py --save-model wrote")
    for key in state:
        if not re.fullmatch(r"emb_l\.\d+\.weight|(bot|top)_l\.\d+\.(weight|bias)", key):
            raise CheckpointError(
                f"{path} has '{key}': parts of a distributed model, compressed tables and weighted pooling have no "
                "counterpart; save a model of one process with plain tables"
            )
    count = sum(key.startswith("emb_l.") for key in state)
    tables = [
        PeerArray.of(_tensor(state, f"emb_l.{i}.weight", path), f"{path}: 'emb_l.{i}.weight'") for i in range(count)
    ]
    layers = dlrm_layers(_layers(state, "bot_l", path), _layers(state, "top_l", path), tables)
    return PeerModel(named(tables, names), layers)


def _numpy_scalars() -> list[Any]:
    """What numpy's scalars, such as the losses that such a file holds, are pickled as."""
    scalar: Any = np.float64(0).__reduce__()[0]
    kinds = (np.float32, np.float64, np.int32, np.int64)
    return [(scalar, "numpy._core.multiarray.scalar"), (scalar, "numpy.core.multiarray.scalar"), np.dtype] + [
        type(np.dtype(kind)) for kind in kinds
    ]


def _layers(state: Mapping[str, Tensor], name: str, path: Path) -> list[Layer]:
    count = max(sum(key.startswith(f"{name}.") and key.endswith(".weight") for key in state), 1)
    return [
        Layer(
            _tensor(state, f"{name}.{2 * i}.weight", path),
            _tensor(state, f"{name}.{2 * i}.bias", path),
            f"{path}: '{name}.{2 * i}'",
        )
        for i in range(count)
    ]


def _tensor(state: Mapping[str, Tensor], key: str, path: Path) -> Tensor:
    if key not in state:
        raise CheckpointError(f"{path} has no '{key}'; save the whole state_dict")
    return state[key].detach()
