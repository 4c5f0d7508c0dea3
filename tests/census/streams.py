"""Know what must have ended on the pretended device before what begins: a model of CUDA's streams and events.

Every operation is a tick of its stream's clock. A stream that waits for an event, and a host that waits for one, learn
the clocks of the stream that recorded it (vector clocks, as race detectors of threads keep them). Memory may be read
only by a stream that knows of its last write, and written only by one that knows of all its uses. Memory that was
dropped is given out again to the stream that it was allocated for, as PyTorch's allocator does; that stream must know
of all its uses by others then. A stream is captured with another when it waits for what that was given, and must have
been waited for when the capture ends; until then neither may wait for what was given to streams before they were
captured. Stricter than CUDA, which lets other streams work meanwhile: the thread that captures gives work to captured
streams only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[int, int]


def _learn(into: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        into[stream] = max(into.get(stream, 0), tick)


class Stream:
    """In the place of ``torch.cuda.Stream``."""

    made = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.number, self.clock, self.device = Stream.made, Clock(), torch.device("cuda", 0)
        Stream.made += 1

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        if event.clock:  # else nothing is waited for
            MODEL.capture(self, event)
        _learn(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        MODEL.waited(self.clock)

    def is_capturing(self) -> bool:
        return False


class Event:
    """In the place of ``torch.cuda.Event``."""

    def __init__(self, **_: Any) -> None:
        self.clock, self.capture = Clock(), 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or MODEL.current()
        self.clock, self.capture = dict(stream.clock), MODEL.capture_of(stream)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or MODEL.current()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        MODEL.waited(self.clock)


@dataclass(eq=False)
class _Memory:
    """What is known of some memory: the stream it is for, its last write, and its last use by each stream."""

    owner: int
    storage: StorageWeakRef
    written: tuple[int, int]
    used: Clock = field(default_factory=Clock)


class Model:
    """Streams, and who has used which memory."""

    def __init__(self) -> None:
        self.hazards: list[str] = []
        self.host = Clock()
        self._main, self._here = Stream(), threading.local()  # autograd's threads use the main thread's stream
        self._memory: dict[int, _Memory] = {}
        self._shared: list[_Memory] = []
        self._captured: dict[int, Stream] = {}
        self._capture, self._capturing = 0, 0
        self.where: Callable[[], str] = lambda: ""
        self.on_wait: Callable[[], None] = lambda: None

    def current(self) -> Stream:
        return getattr(self._here, "stream", self._main)

    @contextlib.contextmanager
    def inside(self, stream: Stream | None) -> Generator[None]:
        """In the place of ``torch.cuda.stream``."""
        before = self.current()
        self._enter(before if stream is None else stream)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, stream: Stream) -> None:
        if threading.current_thread() is threading.main_thread():
            self._main = stream
        else:
            self._here.stream = stream

    def begin_capture(self) -> None:
        """Capture the current stream, and those that wait for it."""
        self._captured = {self.current().number: self.current()}
        self._capture, self._capturing = self._capture + 1, threading.get_ident()

    def capture_of(self, stream: Stream) -> int:
        """Number of the capture that a stream is in, counted from 1; else 0."""
        return self._capture if stream.number in self._captured else 0

    def capture(self, stream: Stream, event: Event) -> None:
        """Capture a stream, too, that waits for an event that was captured."""
        if self._captured and event.capture == self._capture:
            self._captured[stream.number] = stream
        elif stream.number in self._captured:
            raise RuntimeError("dependency created on uncaptured work in another stream")

    def end_capture(self) -> None:
        """End it, in the stream that it began in."""
        captured, self._captured = self._captured, {}
        for number, stream in captured.items():
            if self.current().clock.get(number, 0) < stream.clock.get(number, 0):
                raise RuntimeError("capturing stream has unjoined work")

    def waited(self, clock: Clock) -> None:
        """The host has waited: what it gives to any stream from now on comes later."""
        _learn(self.host, clock)
        self.on_wait()

    def operation(self, reads: Iterable[Tensor], writes: Iterable[Tensor], new: Iterable[Tensor]) -> None:
        """An operation of the current stream, by the tensors of the host that stand for its arguments.

        Those without any bytes are left out: all of them have the same address, 0.
        """
        reads, writes, new = ([t for t in tensors if t.untyped_storage().nbytes()] for tensors in (reads, writes, new))
        stream = self.current()
        captures = self._captured and threading.get_ident() == self._capturing
        if captures and stream.number not in self._captured:
            raise RuntimeError("a step that is captured gives work to a stream that is not")
        _learn(stream.clock, self.host)
        tick = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for tensor in new:
            self._allocate(tensor, stream)
        for tensor in reads:
            memory = self._of(tensor, stream)
            writer, at = memory.written
            if stream.clock.get(writer, 0) < at:
                self.hazards.append(f"stream {stream.number} reads what stream {writer} writes: {self.where()}")
            memory.used[stream.number] = tick
        for tensor in writes:
            memory = self._of(tensor, stream)
            self._check(memory, stream, "writes")
            memory.written = stream.number, tick
            memory.used[stream.number] = tick

    def _allocate(self, tensor: Tensor, stream: Stream) -> None:
        for old in [m for m in self._shared if m.owner == stream.number and m.storage.expired()]:
            self._check(old, stream, "is given the memory of")
            self._shared.remove(old)
        self._memory.pop(tensor.untyped_storage().data_ptr(), None)
        self._of(tensor, stream)

    def _check(self, memory: _Memory, stream: Stream, does: str) -> None:
        late = [u for u, at in memory.used.items() if stream.clock.get(u, 0) < at]
        if late:
            self.hazards.append(f"stream {stream.number} {does} what stream {late[0]} uses: {self.where()}")

    def _of(self, tensor: Tensor, stream: Stream) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage.data_ptr())
        if memory is None or memory.storage.expired():  # else it is what was told of when it was allocated
            tick = stream.clock.get(stream.number, 0)
            memory = _Memory(stream.number, StorageWeakRef(storage), (stream.number, tick))
            self._memory[storage.data_ptr()] = memory
        if memory.owner != stream.number and memory not in self._shared:
            self._shared.append(memory)
        return memory


MODEL = Model()


def replace_streams() -> None:
    """Put the model in the place of PyTorch's streams."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = lambda *_: MODEL.current()
    cuda.stream = MODEL.inside
