"""Memory is page-locked for a device that reads it in place, and what does not fit is refused with the way out.

CUDA is played by these tests where there is none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotbed import large_tensors
from hotbed.errors import StoreError
from hotbed.optim import Moment
from hotbed.store import DenseStore, Span, Storage, memory

CUDA = torch.device("cuda", 0)


class Runtime:
    """What is asked of the CUDA runtime."""

    def __init__(self, failure: int = 0) -> None:
        self.failure, self.wanted = failure, 0
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []
        self.device = 0

    @contextmanager
    def on(self, device: torch.device) -> Generator[None]:
        """Make a device the current one."""
        before, self.device = self.device, device.index
        yield
        self.device = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 3
        assert self.device == self.wanted
        self.locked[address] = nbytes
        return self.failure

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.device == self.wanted
        self.calls.append("unregister")
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    played = Runtime()

    def check_error(code: int) -> None:
        if code:
            raise RuntimeError(f"out of memory ({code})")

    def as_tensor(exporter: Any, device: torch.device) -> torch.Tensor:
        assert device.index == played.wanted
        told = exporter.__cuda_array_interface__
        assert told["typestr"] == "|u1" and told["version"] == 3 and told["data"][1] is False
        (nbytes,), (address, _) = told["shape"], told["data"]
        assert played.locked[address] >= nbytes
        there: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        there.exporter = exporter  # a tensor of torch's keeps it, too
        return torch.from_numpy(np.ctypeslib.as_array(there))

    monkeypatch.setattr(torch.cuda, "cudart", lambda: played)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", played.on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: played.calls.append(f"synchronize {device}"))
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    return played


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cuda:0", torch.float32),
        ("cuda", torch.bfloat16),
        ("cuda:1", torch.float8_e4m3fn),
        ("cuda:1", torch.int8),
    ],
)
def test_rows_are_locked_in_pages_of_their_own_and_unlocked_when_nobody_has_them(
    runtime: Runtime, device: str, dtype: torch.dtype
) -> None:
    where = torch.device(device)
    runtime.wanted = where.index or 0  # not the current device: it would get a context, which takes memory
    tensor = memory.host_zeros((1000, 17), dtype, where)
    assert tensor.shape == (1000, 17) and tensor.dtype == dtype and not tensor.float().any()
    ((address, nbytes),) = runtime.locked.items()
    assert nbytes >= tensor.nbytes and address % 4096 == 0 and nbytes % 4096 == 0
    assert not runtime.calls
    del tensor
    assert runtime.calls == [f"synchronize cuda:{runtime.wanted}", "unregister"] and not runtime.locked


def test_nothing_is_locked_for_the_cpu(runtime: Runtime) -> None:
    assert not memory.host_zeros((3, 4), torch.float32, torch.device("cpu")).any()
    assert not runtime.locked


def test_what_cannot_be_locked_is_an_error(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.failure = 2
    with pytest.raises(StoreError, match=r"2,097,152 of .* \(out of memory \(2\)\)"):
        memory.host_zeros((4,), torch.float32, CUDA)
    monkeypatch.setattr(memory, "host_bytes", lambda: 100)
    with pytest.raises(StoreError, match=r"got 160 bytes, expected at most 100 bytes"):
        memory.host_zeros((40,), torch.float32, CUDA)
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(StoreError, match=r"got 'uva' on win32, expected Linux"):
        memory.host_zeros((4,), torch.float32, CUDA)


def test_rows_that_are_read_in_place_have_no_cache() -> None:
    storage = Storage("host", cache_rows=1000, host="uva")
    with pytest.raises(StoreError, match=r"got 1,000, expected 0 .*host 'uva'"):
        storage.make([Span(4)], 16, dtype="fp32", device=torch.device("cpu"), backend="auto")


def test_staging_is_page_locked_for_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: asked.append((shape, options)))
    memory.staging((2, 3), torch.uint8, torch.device("cpu"))
    memory.staging((2, 3), torch.uint8, CUDA)
    assert [options["pin_memory"] for _, options in asked] == [False, True]


# -- what does not fit ---------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_free_memory_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    groups = tmp_path / "sys" / "fs" / "cgroup"
    assert memory.available_bytes(CPU) is None
    written(tmp_path / "proc", meminfo="MemTotal:  24000 kB\nHugePages_Total: 0\n")
    assert memory.available_bytes(CPU) is None
    written(tmp_path / "proc", meminfo="MemTotal:  24000 kB\nMemAvailable:   9000 kB\nSwapFree: 7 kB\n")
    assert memory.available_bytes(CPU) == 9007 * 1024
    written(tmp_path / "proc" / "self", cgroup="0::/job/step\n")
    assert memory.available_bytes(CPU) == 9007 * 1024  # there is no such group in this container
    written(groups / "job" / "step", memory__max="max\n", memory__current="1\n", memory__stat="inactive_file 5\n")
    assert memory.available_bytes(CPU) == 9007 * 1024
    written(groups / "job", memory__max="1000\n", memory__current="300\n", memory__stat="anon 1\ninactive_file 50\n")
    assert memory.available_bytes(CPU) == 750
    limits = {"memory__limit_in_bytes": "600\n", "memory__usage_in_bytes": "700\n"}
    written(groups / "memory" / "old", **limits, memory__stat="total_inactive_file 10\n")
    written(tmp_path / "proc" / "self", cgroup="4:memory:/old\n3:cpuset:/\n0::/\n")
    assert memory.available_bytes(CPU) == 0


def test_rows_that_do_not_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _: 100 << 20)
    DenseStore([Span(1 << 20, 0)], 20)
    message = r"got 134,217,728 bytes, expected at most the 104,857,600 free bytes. Use memory.tier disk"
    with pytest.raises(StoreError, match=message):
        DenseStore([Span(1 << 20, 0)], 32)
    DenseStore([Span(1 << 20, 0)], 32, dtype="int8")
    DenseStore([Span(1 << 40, 0)], 32, device="meta")


def test_memory_that_the_system_does_not_give_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    store = DenseStore([Span(1 << 20, 0)], 4)
    monkeypatch.setattr(large_tensors.mmap, "mmap", refuses)
    for make in (memory.allocate_zeros, memory.allocate):
        with pytest.raises(StoreError, match=r"cpu memory: got 1,099,511,627,776 bytes.* memory\.tier disk"):
            make((1 << 38,), torch.float32, CPU)
    with pytest.raises(StoreError, match=r"cpu memory: got 16,777,216 bytes"):
        store.add_moment(Moment("m", "element"))
    monkeypatch.setattr(memory, "available_bytes", lambda _: None)
    with pytest.raises(StoreError, match="expected less"):
        memory.allocate_zeros((1 << 38,), torch.float32, CPU)

    def other(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(large_tensors.mmap, "mmap", other)
    with pytest.raises(OSError, match="Too many open files"):
        memory.allocate_zeros((1 << 38,), torch.float32, CPU)


def test_the_tier_that_would_hold_what_a_device_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(memory.torch, "zeros", full)
    free = {"cuda": 1000, "cpu": 1 << 20}
    monkeypatch.setattr(memory, "available_bytes", lambda device: free[device.type])
    with pytest.raises(StoreError, match=r"cuda memory: .* 1,000 free bytes\. Use memory.tier host"):
        memory.allocate_zeros((1 << 18,), torch.float32, CUDA)
    with pytest.raises(StoreError, match=r"memory.tier disk"):
        memory.allocate_zeros((1 << 19,), torch.float32, CUDA)
