"""Save and read differences to a full checkpoint, the base: only the rows that changed since it began.

Stores collect the rows that change (`hotbed.store.slot_lists`) between the starts of two full checkpoints. So each
difference refers to the full checkpoint, not to the previous difference, and loading reads the base and one difference.
Only the base must be kept. A difference grows with the time since the base. If it would hold more than `MOST_SHARE` of
the bytes of all rows, a full checkpoint is saved instead. Source: Check-N-Run (NSDI 2022), "one-shot" and
"intermittent" baselines.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from hotbed.checkpoint.blocks import BlockCache, VerifiedFiles
from hotbed.checkpoint.manifest import MANIFEST, Base, FileEntry, Manifest, SavedTable
from hotbed.checkpoint.storage import Directory
from hotbed.checkpoint.tensor_files import TensorFiles
from hotbed.comm import Link
from hotbed.errors import CheckpointError
from hotbed.store import LazyStore, RowStore, SortedSlots

MOST_SHARE = 0.5
"""Of the bytes of all rows, that a difference may hold."""
_KEY_BYTES = 8

_log = logging.getLogger("hotbed")


class Baseline(NamedTuple):
    """A full checkpoint, since which stores note which rows change.

    Its token is the same on all ranks. Only the first rank knows the SHA-256 of its manifest, once that is written.
    """

    place: Directory
    token: str
    sha256: str | None
    tables: Mapping[str, SavedTable]

    @property
    def base(self) -> Base:
        """Its entry in the manifest of a difference to it, which the first rank writes."""
        return Base.model_construct(name=self.place.name, sha256=self.sha256 or "")  # other ranks do not know the hash


def changed_since(
    base: Baseline,
    place: Directory,
    stores: Sequence[RowStore],
    tables: Mapping[str, SavedTable],
    link: Link | None,
) -> dict[RowStore, SortedSlots] | None:
    """Find which rows of this rank's stores have changed since a base; all ranks must call this.

    Return slots by store; or None, on all ranks, where all rows must or should be saved: the log says why. If the first
    rank cannot look at the base, it raises the `OSError` and the others a `CheckpointError`.
    """
    is_first = link is None or link.rank == 0
    reason, error = "" if tables == base.tables else "it has other tables, or other moments", None
    reason = reason or next((why for store in stores if (why := _unknown(store, base))), "")
    try:
        reason = (_unusable(base, place) if is_first else "") or reason
    except (CheckpointError, OSError) as raised:  # the others must not wait for this rank in vain
        error = raised
    changed = {} if reason or error else {store: store.changed() for store in stores}
    sizes = [_nbytes(store, slots) for store, slots in changed.items()]
    own = torch.tensor(
        [bool(reason), sum(s[0] for s in sizes), sum(s[1] for s in sizes), error is not None], dtype=torch.int64
    )
    if link is not None:
        own = link.all_gather("bytes of changed rows", own.to(link.device)).wait().cpu().view(-1, 4).sum(0)
    failed, of_changed, of_all, errors = own.tolist()
    if error is not None:
        raise error
    if errors:
        raise CheckpointError(
            f"{place} was not saved: rank 0 could not look at its base {base.place.name}; its own output says why"
        )
    if not failed and of_changed > MOST_SHARE * of_all:
        reason = f"{of_changed:,} of {of_all:,} bytes of rows have changed"
    if failed or reason:
        if reason and (is_first or failed):
            _log.info("%s holds all rows, not only those that changed since %s: %s", place, base.place.name, reason)
        return None
    return changed


def _unknown(store: RowStore, base: Baseline) -> str:
    """Why it is not known which rows of a store have changed."""
    if store.changes is None or store.changes.since not in (base.token, None):
        return "it is not the newest checkpoint with track=True of these tables"
    if store.changes.since is None:
        return "tables or moments were loaded, filled or made anew since"
    return ""


def _unusable(base: Baseline, place: Directory) -> str:
    """Why a checkpoint cannot be the base of one at a place."""
    if base.sha256 is None:
        return "it is not written yet"
    if not re.fullmatch(r"\w[\w.-]{0,254}", base.place.name):
        return "its name has other characters than letters, digits, '_', '-' and '.'"
    if place.sibling(base.place.name).path != base.place.sibling(base.place.name).path:
        return f"it is in another directory, {base.place}"
    return "" if base.place.has(MANIFEST) else "it is gone"


def _nbytes(store: RowStore, slots: SortedSlots) -> tuple[int, int]:
    """Bytes of these rows in a difference, and of all rows in a full checkpoint."""
    if isinstance(store, LazyStore):
        row = store.records.record_bytes + _KEY_BYTES
        return row * len(slots), row * len(store.existing())
    return (store.nbytes // max(store.slots, 1) + _KEY_BYTES) * len(slots), store.nbytes


@contextmanager
def open_with_bases(place: Directory, manifest: Manifest) -> Generator[TensorFiles]:
    """Open the files of a checkpoint, and those of its base, for reading."""
    with ExitStack() as stack:
        cache = BlockCache()
        stack.callback(cache.close)

        def files(of: Directory, entries: Mapping[str, FileEntry], base: TensorFiles | None) -> TensorFiles:
            return TensorFiles(stack.enter_context(VerifiedFiles(of, entries, cache)), base)

        base = manifest.base
        under = None if base is None else files(place.sibling(base.name), manifest.base_files, None)
        yield files(place, manifest.files, under)


def nbytes_with_base(manifest: Manifest) -> int:
    """Bytes of all files that a checkpoint needs but the manifests."""
    return manifest.nbytes + sum(entry.bytes for entry in manifest.base_files.values())
