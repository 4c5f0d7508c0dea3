"""Import models of other libraries, and write them as checkpoints (`dlrm`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hotbed.checkpoint.importers.dlrm_checkpoint import (
    read_dcp,
    read_embedding_bags,
    read_facebook,
    read_nvidia,
    read_torchrec,
)
from hotbed.checkpoint.importers.peer import Names, Peer, PeerModel, write_peer
from hotbed.checkpoint.manifest import Manifest
from hotbed.checkpoint.storage import Directory
from hotbed.errors import CheckpointError

__all__ = ["Peer", "import_checkpoint"]


def import_checkpoint(
    source: str | Path,
    target: str | Path | Directory,
    peer: Peer,
    *,
    names: Names = None,
    prefix: str = "",
    collection: str = "embeddings",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Make a checkpoint of what another library saved; tables are read by rows, so they may be larger than memory.

    It has one part, ``model``. That of a DLRM loads into `hotbed.nn.DLRM` with ``features`` in the order of the tables
    here, and gives the same logits: columns of the first top layer are permuted to hotbed's order of pairs, and padding
    is left out.

    Parameters
    ----------
    source
        A local directory or file.
    target
        Path or URI of the checkpoint to make.
    peer
        Who wrote it:

        - ``nvidia_dlrm``: directory of NVIDIA's PyTorch DLRM.
        - ``torchrec``: ``state_dict`` of ``torchrec.models.dlrm.DLRM``: unsharded in a safetensors or ``.pt`` file, or
          as it is sharded in a directory of ``torch.distributed.checkpoint``.
        - ``facebook_dlrm``: ``.pt`` file of ``dlrm_s_pytorch.py --save-model``.
        - ``embedding_bag``: weights of ``nn.EmbeddingBag`` or ``nn.Embedding`` in a safetensors or ``.pt`` file, or a
          directory of these and of ``.npy`` files, one per table.
        - ``dcp``: the same in a directory of ``torch.distributed.checkpoint``, sharded or not.
    names
        Names of the tables. For ``nvidia_dlrm`` and ``facebook_dlrm`` what to call them, in the order of the features
        (default ``cat_0``, …); for ``torchrec`` its own, in the order of its ``EmbeddingBagConfig``s; for
        ``embedding_bag`` and ``dcp`` which weights are tables (default: all matrices ``NAME.weight`` without
        ``NAME.bias``), or by table the key of its weight.
    prefix
        What the names of the model's tensors begin with, such as ``model.``: it is left out, and so are all others.
        For ``embedding_bag``, ``dcp`` and ``torchrec``.
    collection
        Attribute of the model that is the `EmbeddingCollection`.
    progress
        Called now and then with cells done and all cells.

    Raises
    ------
    CheckpointError
        If something is missing, does not fit, or cannot be what hotbed's model computes; ``target`` is not made then.
    """
    if isinstance(names, Mapping) and peer not in ("embedding_bag", "dcp"):
        raise CheckpointError(f"names gives keys of weights, which {peer} has none of; give the tables' names only")
    if prefix and peer not in ("embedding_bag", "dcp", "torchrec"):
        raise CheckpointError(f"prefix is '{prefix}', but what {peer} saves has names of its own; leave it out")
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    readers: Mapping[Peer, Callable[[Path, Any], PeerModel]] = {
        "nvidia_dlrm": read_nvidia,
        "torchrec": partial(read_torchrec, prefix=prefix),
        "facebook_dlrm": read_facebook,
        "embedding_bag": partial(read_embedding_bags, collection=collection, prefix=prefix),
        "dcp": partial(read_dcp, collection=collection, prefix=prefix),
    }
    given: Any = names  # that of the peer, as checked above
    return write_peer(readers[peer](path, given), target, collection, progress)
