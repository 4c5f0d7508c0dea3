# pyright: basic, reportCallIssue=false
"""Find, read and replace the records of a cache; number, read and write those of a file. All in Numba.

*Cache* (`hotbed.ops.reference`): set-associative; a key may be in any of the ways of one set, which its hash
decides.

*Numbers*, on the host alone: a hash table from int64 keys to the numbers 0, 1, 2, … in which they were added; open
addressing, linear probing.

*Files*, on the host alone: records read and written by threads that hold no lock of Python's; each call is one
thread's.
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
"""Keys whose places a task brings closer before it searches them: 32 ways of 8 bytes are 16 KiB."""


@kernel(inline="always")
def _set_of(key, sets):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    return np.int64(mixed % np.uint64(sets))


@kernel()
def sets_of(keys, sets, out):
    """Set of each key ``[n]``."""
    for i in range(keys.shape[0]):
        out[i] = _set_of(keys[i], sets)


@kernel(parallel=True)
def find(keys, sets, first_set, ways, wanted, out):
    """Place of each wanted key ``[n]`` into ``out``, −1 where it is not here; of all sets some, from one on, are."""
    for task in prange((wanted.shape[0] + KEYS_PER_TASK - 1) // KEYS_PER_TASK):
        start, stop = task * KEYS_PER_TASK, min((task + 1) * KEYS_PER_TASK, wanted.shape[0])
        firsts = np.empty(KEYS_PER_TASK, np.int64)
        for i in range(start, stop):
            firsts[i - start] = (_set_of(wanted[i], sets) - first_set) * ways
            prefetch_bytes(keys, firsts[i - start], ways * 8)
        for i in range(start, stop):
            key, first, found = wanted[i], firsts[i - start], np.int64(-1)
            for at in range(first, first + ways):  # to the end: 8 at once, without a branch
                found = np.int64(at) if peek(keys, at) == key else found
            out[i] = found


@kernel()
def use(times, counts, places, now):
    """Note that these places are used now; −1 is none."""
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
    """Find a place for each of these distinct keys ``[n]``, which are not here or −1, and note that it is used now.

    That of the least recently used key of its set, or, ``by_count``, the least often used one (of equals the least
    recently used); free places first, and none that is used now: then ``out`` is −1.
    ``evicted`` gets the key that was there, or −1.
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
    """Place of each wanted key, see `hotbed.ops.reference.cache_find`."""
    launches["cpu.cache_find"] += 1
    out = torch.empty_like(wanted)
    launch(find, tags.keys.numpy(), tags.sets, 0, tags.ways, wanted.numpy(), out.numpy())
    return out


def cache_use(tags: CacheTags, places: Tensor, now: int) -> None:
    """Note that places are used now, see `hotbed.ops.reference.cache_use`."""
    launches["cpu.cache_use"] += 1
    use(tags.times.numpy(), tags.counts.numpy(), places.numpy(), now)


def cache_take(tags: CacheTags, wanted: Tensor, now: int) -> tuple[Tensor, Tensor]:
    """Find places for new keys, see `hotbed.ops.reference.cache_take`."""
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
    """Copy rows ``slab[places]`` to ``out [n, bytes]`` uint8; rows of which the place is −1 stay.

    Where rows on one side are longer, here and in `write_rows`, it is about as many of their first bytes.
    """
    _copy(slab, places, out, into_slab=False)


def write_rows(slab: Tensor, places: Tensor, rows: Tensor) -> None:
    """Copy ``rows [n, bytes]`` uint8 to ``slab[places]``, distinct places; those of place −1 nowhere."""
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
"""What a free place holds; keys are not negative."""


@kernel(inline="always")
def _place(key, mask):
    """Where the search for a key begins: the upper half of a product with the golden ratio (Fibonacci hashing)."""
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(mask))


@kernel(parallel=True)
def find_numbers(places, numbers, keys, out):
    """Number of each key ``[n]`` into ``out``, −1 for those that are not there."""
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
    """Add distinct keys that are not there, numbered from ``first`` on; there must be room."""
    mask = places.shape[0] - 1
    for i in range(keys.shape[0]):
        at = _place(keys[i], mask)
        while places[at] != EMPTY:
            at = (at + 1) & mask
        places[at] = keys[i]
        numbers[at] = first + i


@kernel()
def mark(bits, numbers, new):
    """Set the bit of each number ``[n]``; whether it was not set before goes into ``new``. −1 is no number."""
    for i in range(numbers.shape[0]):
        number = numbers[i]
        new[i] = number >= 0 and not bits[number >> 3] >> (number & 7) & 1
        if new[i]:
            bits[number >> 3] |= 1 << (number & 7)


@kernel(inline="always")
def _is_marked(bits, number, all_from):
    return number >= all_from or bits[number >> 3] >> (number & 7) & 1 == 1


@kernel()
def count_keys(keys, bits, all_from, low, width, counts):
    """Count marked keys by interval: ``counts[i]`` intervals of ``width`` from ``low`` on.

    The key with number ``i`` is marked if its bit is set or ``i >= all_from``.
    """
    high = low + width * counts.shape[0]
    for i in range(keys.shape[0]):
        if low <= keys[i] < high and _is_marked(bits, i, all_from):
            counts[(keys[i] - low) // width] += 1


@kernel()
def select_keys(keys, bits, all_from, low, high, out):
    """Copy marked keys from ``low`` to below ``high`` into ``out``, in the order in which they lie."""
    at = 0
    for i in range(keys.shape[0]):
        if low <= keys[i] < high and _is_marked(bits, i, all_from):
            out[at] = keys[i]
            at += 1


@kernel()
def find_rising(values, wanted, out):
    """Find wanted values ``[n]`` among rising ones: their positions into ``out``, −1 for those that are not there.

    Fastest where wanted values rise, too.
    """
    at = 0
    for i in range(wanted.shape[0]):
        at = _search(values, wanted, i, at)
        out[i] = at if at < values.shape[0] and values[at] == wanted[i] else -1


@kernel()
def find_more(values, waiting, wanted, there, out, looks_up):
    """Find wanted values ``[n]`` among rising ones, but for those that are ``there`` already.

    Their positions into ``out``, −1 for others; what is found is ``there`` from then on. If ``looks_up``, wanted values
    do not wait any more. Returns how many of the new ones were ``waiting``, and how many of all.
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
    """Find the first of rising values that is not less than ``wanted[i]``.

    The search begins where the last one ended, in steps that grow, or at 0 where values have fallen.
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
    """Read the records with these rising numbers ``[n]`` into rows ``at [n]`` of ``out [m, bytes]``.

    Of records that are longer than rows of ``out`` the first bytes are read. Neighbours in the file that are neighbours
    in ``out`` are read by one call. Returns how many records were read: all, or those before a failure.
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
    """Write ``records [n, bytes]`` to these places; neighbours by one call. Returns as above."""
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
