"""Import models of other libraries as checkpoints."""

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
    """Convert a model of another library into a checkpoint. Tables may be larger than memory, as they are read by rows.

    The checkpoint has one part, ``model``. The part of a DLRM loads into `hotbed.nn.DLRM` with ``features`` in the
    order of the checkpoint's tables, and computes the same logits. Columns of the first top layer are permuted into
    hotbed's order of pairs, and padding is removed.

    Parameters
    ----------
    source
        A local directory or file.
    target
        Path or URI of the checkpoint to create.
    peer
        Format of the source:

        - ``nvidia_dlrm``: directory of NVIDIA's PyTorch DLRM.
        - ``torchrec``: ``state_dict`` of ``torchrec.models.dlrm.DLRM``, unsharded in a safetensors or ``.pt`` file, or
          sharded in a directory of ``torch.distributed.checkpoint``.
        - ``facebook_dlrm``: ``.pt`` file of ``dlrm_s_pytorch.py --save-model``.
        - ``embedding_bag``: weights of ``nn.EmbeddingBag`` or ``nn.Embedding`` in a safetensors or ``.pt`` file, or a
          directory of such files and of ``.npy`` files with one table each.
        - ``dcp``: weights of these modules in a directory of ``torch.distributed.checkpoint``, sharded or not.
    names
        Names of the tables. For ``nvidia_dlrm`` and ``facebook_dlrm``: the new names, in the order of the features
        (default: ``cat_0``, …). For ``torchrec``: the names in the source, in the order of its
        ``EmbeddingBagConfig``s. For ``embedding_bag`` and ``dcp``: the weights that are tables (default: all matrices
        ``NAME.weight`` without ``NAME.bias``), or the keys of their weights by table.
    prefix
        Prefix of the names of the model's tensors, e.g. ``model.``. It is removed, and tensors without it are ignored.
        For ``embedding_bag``, ``dcp`` and ``torchrec``.
    collection
        Attribute of the model that holds the `EmbeddingCollection`.
    progress
        Called repeatedly with the number of processed and of all elements of tables.

    Raises
    ------
    CheckpointError
        If the source is incomplete, is inconsistent, or has a model that hotbed cannot represent. ``target`` is not
        created then.
    """
    if isinstance(names, Mapping) and peer not in ("embedding_bag", "dcp"):
        raise CheckpointError(
            f"names: got keys of weights by table, expected a list of names for {peer}. Pass only the tables' names"
        )
    if prefix and peer not in ("embedding_bag", "dcp", "torchrec"):
        raise CheckpointError(f"prefix: got '{prefix}', expected none, because {peer} has fixed names. Remove it")
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
    given: Any = names  # the type that the reader expects, as checked above
    return write_peer(readers[peer](path, given), target, collection, progress)
