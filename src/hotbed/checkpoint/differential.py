"""Save and read differential checkpoints, which hold only the rows that have changed since a full checkpoint.

The full checkpoint is the *base*. Stores collect changed rows (`hotbed.store.slot_lists`) from the start of one full
checkpoint to the start of the next. So each differential checkpoint refers to the base and not to the previous
differential one. Loading reads the base and one differential checkpoint, and only the base must be kept. If the changed
rows are more than `MOST_SHARE` of the bytes of all rows, a full checkpoint is saved instead. Source: Check-N-Run (NSDI
2022), "one-shot" and "intermittent" baselines.
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
"""Upper limit of the bytes of changed rows, as a fraction of the bytes of all rows."""
_KEY_BYTES = 8

_log = logging.getLogger("hotbed")


class Baseline(NamedTuple):
    """A full checkpoint that can be a base, because stores have tracked changed rows since it began.

    The token is the same on all ranks. Only the first rank has the SHA-256 of the manifest, after it is written.
    """

    place: Directory
    token: str
    sha256: str | None
    tables: Mapping[str, SavedTable]

    @property
    def base(self) -> Base:
        """Its entry in the manifest of a differential checkpoint."""
        # Only the first rank, which writes the manifest, knows the hash.
        return Base.model_construct(name=self.place.name, sha256=self.sha256 or "")


def changed_since(
    base: Baseline,
    place: Directory,
    stores: Sequence[RowStore],
    tables: Mapping[str, SavedTable],
    link: Link | None,
) -> dict[RowStore, SortedSlots] | None:
    """Return the slots of this rank's stores that have changed since a base. All ranks must call this function.

    Return None on all ranks, and log the reason, if all rows must or should be saved. If the first rank cannot access
    the base, it raises `OSError`, and the other ranks raise `CheckpointError`.
    """
    is_first = link is None or link.rank == 0
    reason, error = "" if tables == base.tables else "it has other tables, or other moments", None
    reason = reason or next((why for store in stores if (why := _explain_untracked(store, base))), "")
    try:
        reason = (_explain_unusable(base, place) if is_first else "") or reason
    except (CheckpointError, OSError) as raised:  # raised after the exchange that the other ranks wait for
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
            f"{place} was not saved: rank 0 could not access its base {base.place.name}. See the log of rank 0"
        )
    if not failed and of_changed > MOST_SHARE * of_all:
        reason = f"{of_changed:,} of {of_all:,} bytes of rows have changed"
    if failed or reason:
        if reason and (is_first or failed):
            _log.info("%s holds all rows, not only rows changed since %s: %s", place, base.place.name, reason)
        return None
    return changed


def _explain_untracked(store: RowStore, base: Baseline) -> str:
    """Return the reason why the changed rows of a store are not known, or an empty text."""
    if store.changes is None or store.changes.since not in (base.token, None):
        return "it is not the newest checkpoint with track=True of these tables"
    if store.changes.since is None:
        return "tables or moments were loaded, filled or created since"
    return ""


def _explain_unusable(base: Baseline, place: Directory) -> str:
    """Return the reason why a checkpoint cannot be the base of a checkpoint at ``place``, or an empty text."""
    if base.sha256 is None:
        return "it is not written yet"
    if not re.fullmatch(r"\w[\w.-]{0,254}", base.place.name):
        return "its name has characters other than letters, digits, '_', '-' and '.'"
    if place.sibling(base.place.name).path != base.place.sibling(base.place.name).path:
        return f"it is in another directory, {base.place}"
    return "" if base.place.has(MANIFEST) else "it does not exist any more"


def _nbytes(store: RowStore, slots: SortedSlots) -> tuple[int, int]:
    """Return the bytes of these rows in a differential checkpoint, and of all rows in a full checkpoint."""
    if isinstance(store, LazyStore):
        row = store.records.record_bytes + _KEY_BYTES
        return row * len(slots), row * len(store.existing())
    return (store.nbytes // max(store.slots, 1) + _KEY_BYTES) * len(slots), store.nbytes


@contextmanager
def open_with_bases(place: Directory, manifest: Manifest) -> Generator[TensorFiles]:
    """Open the files of a checkpoint and of its base for reading."""
    with ExitStack() as stack:
        cache = BlockCache()
        stack.callback(cache.close)

        def files(of: Directory, entries: Mapping[str, FileEntry], base: TensorFiles | None) -> TensorFiles:
            return TensorFiles(stack.enter_context(VerifiedFiles(of, entries, cache)), base)

        base = manifest.base
        under = None if base is None else files(place.sibling(base.name), manifest.base_files, None)
        yield files(place, manifest.files, under)


def nbytes_with_base(manifest: Manifest) -> int:
    """Return the bytes of a checkpoint's files and of its base's files, without manifests."""
    return manifest.nbytes + sum(entry.bytes for entry in manifest.base_files.values())
