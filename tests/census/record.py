"""Note what a training step asks of the pretended device, and which line of the project asks for it."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tests.census import graphs

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Event:
    """Something a step asks of the device.

    Attributes
    ----------
    kind
        ``"launch"``, ``"allocation"``, ``"crossing"`` (between host and device), or ``"host"``: page-locked memory is
        allocated, or the host waits for an event.
    what
        Operation or kernel; of a crossing the direction, bytes, and whether the host waits.
    where
        ``file:line`` of the project that asked for it.
    count
        Kernels that a launch of this operation is; bytes of an allocation.
    waits
        Whether the host waits for the device.
    detail
        Grid of a kernel; shapes of its arguments, and which memory they are in.
    inside
        Whether a CUDA graph of the step would be captured then.
    nbytes
        Of the tensors that a launch is given and makes, each time it is named: what it reads and writes, where it uses
        all of each.
    flops
        Floating-point operations of a matrix product.
    """

    kind: str
    what: str
    where: str
    count: int = 1
    waits: bool = False
    detail: str = ""
    inside: bool = False
    nbytes: int = 0
    flops: int = 0


@dataclass
class Record:
    """What was noted since a step began, in order."""

    events: list[Event] = field(default_factory=list)
    is_on: bool = False
    is_inside: bool = False
    memory: dict[int, str] = field(default_factory=dict)
    made: Counter[str] = field(default_factory=Counter)
    thread: threading.local = field(default_factory=threading.local)

    def note(
        self,
        kind: str,
        what: str,
        count: int = 1,
        *,
        waits: bool = False,
        detail: str = "",
        nbytes: int = 0,
        flops: int = 0,
    ) -> None:
        """Note an event, unless this thread is computing what a kernel would; what a graph cannot hold fails in one."""
        if getattr(self.thread, "is_computing", False):
            return
        if kind == "host" or (kind == "crossing" and (waits or not what.startswith("device to host"))):
            graphs.forbid(what)
        if self.is_on:
            self.events.append(Event(kind, what, where(), count, waits, detail, self.is_inside, nbytes, flops))

    def begin(self) -> list[Event]:
        """Begin a step; return what was noted before."""
        before, self.events = self.events, []
        self.made.clear()
        return before

    def allocated(self, what: str, host: Tensor) -> None:
        """Note an allocation; its memory is known by what it is for and a number, the same in each step."""
        self.note("allocation", what, host.nbytes)
        kind = "input" if self.is_on and where().startswith(INPUTS) else "memory"
        self.made[kind] += 1
        self.memory[host.untyped_storage().data_ptr()] = f"{kind} {self.made[kind]}"

    def memory_of(self, host: Tensor) -> str:
        """Say which memory a tensor is in: a number of this step's, or where it stays from step to step."""
        address = host.untyped_storage().data_ptr()
        return f"{self.memory.get(address, hex(address))} + {host.storage_offset()}"

    @contextlib.contextmanager
    def computing(self) -> Generator[None]:
        """Note nothing of this thread inside."""
        before, self.thread.is_computing = getattr(self.thread, "is_computing", False), True
        try:
            yield
        finally:
            self.thread.is_computing = before


def asked_for(events: Iterable[Event]) -> Counter[str]:
    """Count launches, copies that nobody waits for, waits for all that was given; the host's events by name."""
    found: Counter[str] = Counter()
    for event in events:
        if event.kind == "launch":
            found["launches"] += event.count
        elif event.kind == "crossing":
            found["waits" if event.waits else "copies"] += 1
        elif event.kind == "host":
            found[event.what] += 1
    return found


INPUTS = ("batch.py", "jagged.py")
"""Where batches are copied to the device."""
RECORD = Record()


def where() -> str:
    """Name the innermost line of the project's sources, else of its tests' or PyTorch's."""
    frames = traceback.extract_stack()
    source = str(ROOT / "src" / "hotbed")
    own = [
        f"{Path(f.filename).relative_to(ROOT / 'src/hotbed')}:{f.lineno}"
        for f in frames
        if f.filename.startswith(source)
    ]
    own = [o for o in own if not o.startswith(("ops/triton", "torch_hooks"))] or own
    outer = [
        f"torch/{Path(f.filename).name}:{f.name}"
        for f in frames
        if "/torch/" in f.filename and "_python_dispatch" not in f.filename
    ]
    node = torch._C._current_autograd_node()
    if node is not None and not (
        own and "backward" in "".join(f.name for f in frames if f.filename.startswith(source))
    ):
        return f"backward of {node.name().removesuffix('0').removesuffix('Backward')}"
    return own[-1] if own else outer[-1] if outer else "torch"


@contextlib.contextmanager
def recorded() -> Generator[None]:
    """Note what happens inside."""
    RECORD.is_on = True
    try:
        yield
    finally:
        RECORD.is_on = False
