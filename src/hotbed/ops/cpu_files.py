# pyright: basic, reportCallIssue=false
"""Records of a file, read and written by threads that hold no lock of Python's; each call is for one thread."""

from __future__ import annotations

from numba import types

from hotbed.ops.cpu_runtime import kernel

_SIGNATURE = types.int64(types.int32, types.uintp, types.uintp, types.int64)
_pread = types.ExternalFunction("pread", _SIGNATURE)
_pwrite = types.ExternalFunction("pwrite", _SIGNATURE)


@kernel()
def read_records(file, numbers, at, out):
    """Read the records with these rising numbers ``[n]`` into rows ``at [n]`` of ``out [m, bytes]``.

    Neighbours in the file that are neighbours in ``out`` are read by one call. Returns how many records were read: all,
    or those before a failure.
    """
    size = out.shape[1]
    first = 0
    while first < numbers.shape[0]:
        last = first + 1
        while last < numbers.shape[0] and numbers[last] == numbers[last - 1] + 1 and at[last] == at[last - 1] + 1:
            last += 1
        done, wanted = 0, (last - first) * size
        while done < wanted:
            here, there = out.ctypes.data + at[first] * size + done, numbers[first] * size + done
            count = _pread(file, here, wanted - done, there)
            if count <= 0:
                return first
            done += count
        first = last
    return first


@kernel()
def write_records(file, numbers, records):
    """Write ``records [n, bytes]`` to the places of these rising numbers; neighbours by one call. Returns as above."""
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
