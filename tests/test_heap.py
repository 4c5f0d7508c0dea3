"""Commands set what glibc's heap shares and keeps, in fresh processes, unless the user has said something else."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from hotbed import machine


def run(code: str, **env: str) -> list[str]:
    """Lines that a process says in an environment that says nothing of the heap but this."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", code], env=kept | env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


HEAPS = """
import ctypes, os, sys, threading
from hotbed.machine import share_heap

print(share_heap(os.environ), flush=True)
all_allocate = threading.Barrier(6)
threads = [threading.Thread(target=lambda: (bytearray(10_000), all_allocate.wait())) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
stdout = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stdout)
libc.fflush(stdout)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_of_a_command_share_few_arenas_unless_the_user_has_set_how_many() -> None:
    own, *heaps = run(HEAPS)
    assert own == "True" and sum(line.startswith("<heap nr=") for line in heaps) == machine.HEAPS
    for name, value in (("MALLOC_ARENA_MAX", "5"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=5")):
        own, *heaps = run(HEAPS, **{name: value})
        assert own == "False" and sum(line.startswith("<heap nr=") for line in heaps) == 5


def test_nothing_is_set_where_the_c_library_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("", ""))
    assert not machine.share_heap({})
    assert not machine.keep_heap({})


FAULTS = """
import itertools, os, resource, torch
from hotbed.machine import heap_is_kept, keep_heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [torch.ones(16 << 20) for _ in range(3)]  # 64 MiB each, which glibc itself would map and unmap

print(keep_heap(os.environ), heap_is_kept())
counted = [faults()]
for _ in range(12):
    step()
    counted.append(faults())
print(min(after - before for before, after in itertools.pairwise(counted)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that keeps blocks")
def test_freed_blocks_are_kept_for_the_next_step_unless_the_user_has_set_what_is() -> None:
    own, faults = run(FAULTS)
    assert own == "True True" and int(faults) < 100
    for name, value in (
        ("MALLOC_MMAP_THRESHOLD_", "33554432"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ):
        own, faults = run(FAULTS, **{name: value})
        assert own == "False False" and int(faults) > 100
