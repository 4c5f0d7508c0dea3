# pyright: basic, reportCallIssue=false
"""Manage the records of a cache, the numbers of keys, and the records of a file, in Numba.

*Cache* (`hotbed.ops.reference`): The cache is set-associative. The hash of a key determines its set, and the key can be
in any way of the set.

*Numbers*, only on the host: A hash table maps int64 keys to the numbers 0, 1, 2, … in the order of insertion. It uses
open addressing and linear probing.

*Files*, only on the host: Threads read and write records without holding Python's global interpreter lock. Each call
runs in one thread.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange, types
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import peek, poke, prefetch_bytes
from hotbed.ops.cpu_runtime import PREFETCH_ROWS, kernel, launch
from hotbed.ops.layout import FREE, CacheTags

KEYS_PER_TASK = 64
"""Number of keys per task. A task first prefetches the positions of all its keys: 32 ways of 8 bytes are 16 KiB."""


@kernel(inline="always")
def _set_of(key, sets):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    return np.int64(mixed % np.uint64(sets))


@kernel()
def sets_of(keys, sets, out):
    """Write the set of each key ``[n]`` to ``out``."""
    for i in range(keys.shape[0]):
        out[i] = _set_of(keys[i], sets)


@kernel(parallel=True)
def find(keys, sets, first_set, ways, wanted, out):
    """Write the position of each wanted key ``[n]`` to ``out``, or −1. ``keys`` begin at ``first_set`` of all sets."""
    for task in prange((wanted.shape[0] + KEYS_PER_TASK - 1) // KEYS_PER_TASK):
        start, stop = task * KEYS_PER_TASK, min((task + 1) * KEYS_PER_TASK, wanted.shape[0])
        firsts = np.empty(KEYS_PER_TASK, np.int64)
        for i in range(start, stop):
            firsts[i - start] = (_set_of(wanted[i], sets) - first_set) * ways
            prefetch_bytes(keys, firsts[i - start], ways * 8)
        for i in range(start, stop):
            key, first, found = wanted[i], firsts[i - start], np.int64(-1)
            for at in range(first, first + ways):  # no early exit, so that the loop is vectorized without a branch
                found = np.int64(at) if peek(keys, at) == key else found
            out[i] = found


@kernel()
def use(times, counts, places, now):
    """Record that these positions are used now. −1 is skipped."""
    for i in range(places.shape[0]):
        ahead = places[min(i + PREFETCH_ROWS, places.shape[0] - 1)]
        if ahead >= 0:
            prefetch_bytes(times, ahead, 8)
            prefetch_bytes(counts, ahead, 8)
        if places[i] >= 0:
            times[places[i]] = now
            counts[places[i]] += 1


@kernel()
def take(keys, times, counts, sets, first_set, ways, by_count, wanted, now, out, evicted):
    """Assign a position to each of these distinct new keys ``[n]``, and record its use. Keys of −1 are skipped.

    A key gets a free position of its set, else the position of the least recently used key. With ``by_count``, the
    least often used key is evicted (ties: the least recently used). Keys that are used now are not evicted. ``out``
    has the positions, or −1 without a position. ``evicted`` has the evicted keys, or −1.
    """
    for i in range(wanted.shape[0]):
        out[i] = evicted[i] = FREE
        if wanted[i] == FREE:
            continue
        first = (_set_of(wanted[i], sets) - first_set) * ways
        best = -1
        for at in range(first, first + ways):
            if keys[at] == FREE:
                best = at
                break
            if times[at] >= now:
                continue
            if best < 0:
                best = at
            elif by_count and counts[at] != counts[best]:
                if counts[at] < counts[best]:
                    best = at
            elif times[at] < times[best]:
                best = at
        if best >= 0:
            out[i] = best
            evicted[i] = keys[best]
            keys[best] = wanted[i]
            times[best] = now
            counts[best] = 1


def cache_find(tags: CacheTags, wanted: Tensor) -> Tensor:
    """Find the position of each wanted key, see `hotbed.ops.reference.cache_find`."""
    launches["cpu.cache_find"] += 1
    out = torch.empty_like(wanted)
    launch(find, tags.keys.numpy(), tags.sets, 0, tags.ways, wanted.numpy(), out.numpy())
    return out


def cache_use(tags: CacheTags, places: Tensor, now: int) -> None:
    """Record the use of positions, see `hotbed.ops.reference.cache_use`."""
    launches["cpu.cache_use"] += 1
    use(tags.times.numpy(), tags.counts.numpy(), places.numpy(), now)


def cache_take(tags: CacheTags, wanted: Tensor, now: int) -> tuple[Tensor, Tensor]:
    """Assign positions to new keys, see `hotbed.ops.reference.cache_take`."""
    launches["cpu.cache_take"] += 1
    places, evicted = torch.empty_like(wanted), torch.empty_like(wanted)
    state = tags.keys.numpy(), tags.times.numpy(), tags.counts.numpy()
    where = tags.sets, 0, tags.ways
    take(*state, *where, tags.by_count, wanted.numpy(), now, places.numpy(), evicted.numpy())
    return places, evicted


def cache_read(slab: Tensor, places: Tensor, out: Tensor) -> None:
    """Copy records out of a cache, see `hotbed.ops.reference.cache_read`."""
    launches["cpu.cache_read"] += 1
    read_rows(slab, places, out)


def cache_write(slab: Tensor, places: Tensor, records: Tensor) -> None:
    """Copy records into a cache, see `hotbed.ops.reference.cache_write`."""
    launches["cpu.cache_write"] += 1
    write_rows(slab, places, records)


# -- records ---------------------------------------------------------------------------------------------------------

ROWS_PER_TASK = 256


def read_rows(slab: Tensor, places: Tensor, out: Tensor) -> None:
    """Copy rows ``slab[places]`` to ``out [n, bytes]`` uint8. Rows for position −1 do not change.

    If rows of ``slab`` and ``out`` have different sizes, only the first bytes are copied (also in `write_rows`).
    """
    _copy(slab, places, out, into_slab=False)


def write_rows(slab: Tensor, places: Tensor, rows: Tensor) -> None:
    """Copy ``rows [n, bytes]`` uint8 to distinct positions ``slab[places]``. Position −1 is skipped."""
    _copy(slab, places, rows, into_slab=True)


def _copy(slab: Tensor, places: Tensor, rows: Tensor, *, into_slab: bool) -> None:
    widths = slab.shape[1], rows.shape[1]
    slab, rows = slab.view(-1), rows.view(-1)
    if widths[0] % 4 == widths[1] % 4 == 0 and slab.data_ptr() % 4 == rows.data_ptr() % 4 == 0:
        slab, rows, widths = slab.view(torch.int32), rows.view(torch.int32), (widths[0] // 4, widths[1] // 4)
    launch(_copy_rows, slab.numpy(), places.numpy(), rows.numpy(), *widths, into_slab)


@kernel(parallel=True)
def _copy_rows(slab, places, rows, slab_width, rows_width, into_slab):
    width = min(slab_width, rows_width)
    for task in prange((places.shape[0] + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        last = min((task + 1) * ROWS_PER_TASK, places.shape[0])
        for i in range(task * ROWS_PER_TASK, last):
            if i + PREFETCH_ROWS < last and places[i + PREFETCH_ROWS] >= 0:
                prefetch_bytes(slab, places[i + PREFETCH_ROWS] * slab_width, width * slab.itemsize)
            at, of_rows = places[i] * slab_width, i * rows_width
            if at < 0:
                continue
            if into_slab:
                for d in range(width):
                    poke(slab, at + d, peek(rows, of_rows + d))
            else:
                for d in range(width):
                    poke(rows, of_rows + d, peek(slab, at + d))


# -- numbers ---------------------------------------------------------------------------------------------------------

EMPTY = -1
"""Value of a free position. Keys are not negative."""


@kernel(inline="always")
def _place(key, mask):
    """Return the first position of the search for a key, by Fibonacci hashing with the golden ratio."""
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(mask))


@kernel(parallel=True)
def find_numbers(places, numbers, keys, out):
    """Write the number of each key ``[n]`` to ``out``. It is −1 for unknown keys."""
    mask = places.shape[0] - 1
    for task in prange((keys.shape[0] + KEYS_PER_TASK - 1) // KEYS_PER_TASK):
        start, stop = task * KEYS_PER_TASK, min((task + 1) * KEYS_PER_TASK, keys.shape[0])
        for i in range(start, stop):
            at = _place(keys[i], mask)
            prefetch_bytes(places, at, 8)
            prefetch_bytes(numbers, at, 8)
        for i in range(start, stop):
            at = _place(keys[i], mask)
            while places[at] != EMPTY and places[at] != keys[i]:
                at = (at + 1) & mask
            out[i] = numbers[at] if places[at] != EMPTY else -1


@kernel()
def add_numbers(places, numbers, keys, first):
    """Add distinct new keys with numbers from ``first`` on. The table must have enough free positions."""
    mask = places.shape[0] - 1
    for i in range(keys.shape[0]):
        at = _place(keys[i], mask)
        while places[at] != EMPTY:
            at = (at + 1) & mask
        places[at] = keys[i]
        numbers[at] = first + i


@kernel()
def mark(bits, numbers, new):
    """Set the bit of each number ``[n]``. ``new`` gets whether the bit was not set before. −1 is skipped."""
    for i in range(numbers.shape[0]):
        number = numbers[i]
        new[i] = number >= 0 and not bits[number >> 3] >> (number & 7) & 1
        if new[i]:
            bits[number >> 3] |= 1 << (number & 7)


@kernel(inline="always")
def _is_marked(bits, number, all_from):
    return number >= all_from or bits[number >> 3] >> (number & 7) & 1 == 1


@kernel()
def count_keys(keys, bits, all_from, low, high, width, counts):
    """Count marked keys from ``low`` to below ``high`` in intervals of ``width``.

    Interval i begins at ``low + i · width``. The key with number ``i`` is marked if its bit is set or
    ``i >= all_from``.
    """
    for i in range(keys.shape[0]):
        if low <= keys[i] < high and _is_marked(bits, i, all_from):
            counts[(keys[i] - low) // width] += 1


@kernel()
def select_keys(keys, bits, all_from, low, high, out):
    """Copy marked keys from ``low`` to below ``high`` into ``out``, in their order in ``keys``."""
    at = 0
    for i in range(keys.shape[0]):
        if low <= keys[i] < high and _is_marked(bits, i, all_from):
            out[at] = keys[i]
            at += 1


@kernel()
def find_rising(values, wanted, out):
    """Write the positions of wanted values ``[n]`` in ascending ``values`` to ``out``, or −1 for missing values.

    It is fastest if wanted values are ascending.
    """
    at = 0
    for i in range(wanted.shape[0]):
        at = _search(values, wanted, i, at)
        out[i] = at if at < values.shape[0] and values[at] == wanted[i] else -1


@kernel()
def find_more(values, waiting, wanted, there, out, looks_up):
    """Find wanted values ``[n]`` in ascending ``values``, except values that are marked in ``there``.

    ``out`` gets the positions of new values, or −1. Found values are then marked in ``there``. If ``looks_up``, found
    values are removed from ``waiting``. Return the number of waiting values that were new, and of all waiting values.
    """
    at = new = found = 0
    for i in range(wanted.shape[0]):
        at = _search(values, wanted, i, at)
        out[i] = -1
        if at == values.shape[0] or values[at] != wanted[i]:
            continue
        if looks_up and waiting[at]:
            new += not there[i]
            found += 1
            waiting[at] = False
        if not there[i]:
            there[i] = True
            out[i] = at
    return new, found


@kernel(inline="always")
def _search(values, wanted, i, at):
    """Find the first of the ascending ``values`` that is not less than ``wanted[i]``.

    The search begins at the previous result ``at``, with growing steps. It begins at 0 if the wanted value is smaller
    than the previous one.
    """
    value, total = wanted[i], values.shape[0]
    low = at if i and value >= wanted[i - 1] else 0
    high, step = low, 1
    while high < total and values[high] < value:
        low, high, step = high + 1, high + step, 2 * step
    high = min(high, total)
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


# -- files -----------------------------------------------------------------------------------------------------------

_SIGNATURE = types.int64(types.int32, types.uintp, types.uintp, types.int64)
_pread = types.ExternalFunction("pread", _SIGNATURE)
_pwrite = types.ExternalFunction("pwrite", _SIGNATURE)


@kernel()
def read_records(file, record_bytes, numbers, at, out):
    """Read the records with these ascending numbers ``[n]`` into rows ``at [n]`` of ``out [m, bytes]``.

    If records are longer than rows of ``out``, only their first bytes are read. Records that are adjacent in the file
    and in ``out`` are read by one system call. Return the number of records before the first failure.
    """
    size = out.shape[1]
    first = 0
    while first < numbers.shape[0]:
        last = first + 1
        while (
            size == record_bytes
            and last < numbers.shape[0]
            and numbers[last] == numbers[last - 1] + 1
            and at[last] == at[last - 1] + 1
        ):
            last += 1
        done, wanted = 0, (last - first) * size
        while done < wanted:
            here, there = out.ctypes.data + at[first] * size + done, numbers[first] * record_bytes + done
            count = _pread(file, here, wanted - done, there)
            if count <= 0:
                return first
            done += count
        first = last
    return first


@kernel()
def write_records(file, numbers, records):
    """Write ``records [n, bytes]`` to these positions of a file. Adjacent records are written by one system call.

    Return the number of records before the first failure.
    """
    size = records.shape[1]
    first = 0
    while first < numbers.shape[0]:
        last = first + 1
        while last < numbers.shape[0] and numbers[last] == numbers[last - 1] + 1:
            last += 1
        done, wanted = 0, (last - first) * size
        while done < wanted:
            count = _pwrite(
                file, records.ctypes.data + first * size + done, wanted - done, numbers[first] * size + done
            )
            if count <= 0:
                return first
            done += count
        first = last
    return first
