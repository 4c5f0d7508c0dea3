"""Let root be refused what permissions of files refuse, so that read-only directories can be tested by any user."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

import pytest

VERSION_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def obeying_permissions() -> Generator[None]:
    """Give up the capabilities that override permissions, of this thread and those that it starts, for a while."""
    if os.geteuid() != 0:
        yield
        return
    if not sys.platform.startswith("linux"):
        pytest.skip("root is not refused anything here")
    library = ctypes.CDLL(None, use_errno=True)
    header, data = _Header(VERSION_3, 0), (_Data * 2)()
    assert library.capget(ctypes.byref(header), data) == 0
    effective = data[0].effective
    data[0].effective = effective & ~(1 << DAC_OVERRIDE) & ~(1 << DAC_READ_SEARCH)
    assert library.capset(ctypes.byref(header), data) == 0
    try:
        yield
    finally:
        data[0].effective = effective
        assert library.capset(ctypes.byref(header), data) == 0
