"""Join the process group that torchrun started, end processes that hang, and start processes on this machine.

`process_group` also joins when torchrun restarts processes after a failure. `Watchdog` ends a process that makes no
progress, before others wait for it in vain. `run_local` starts several ranks for commands that need them.

torchrun's agent keeps one store for all attempts. In it are the addresses of ranks that are dead, which new ones would
try to reach: Gloo's "Connection refused" (pytorch/pytorch#135712, #167288). ``TORCHELASTIC_RESTART_COUNT`` cannot tell
attempts apart, because every node counts for itself. So the ranks of an attempt find each other first (`fresh_store`):

1. Rank 0 draws a name for the attempt and announces it, in the place of the name before.
2. Every rank answers under the announced name, which may be an old one, with a name of its own, and looks again.
3. Rank 0 waits for the answers to its name and repeats them. A rank that finds its own name there is in this attempt:
   who repeated it has read what this process wrote.

An example with two ranks, started again: the store still has ``attempt = a``. Rank 1 reads ``a``, answers ``a/1 = x``
and finds no list of answers with ``x``, so it looks again. Rank 0 sets ``attempt = b``; rank 1 answers ``b/1 = x``;
rank 0 sets ``b/all = {"1": "x"}``, and both use the part ``b`` of the store.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from hotbed.comm import waits
from hotbed.config import ParallelRecipe, Recipe
from hotbed.errors import CommError
from hotbed.machine import fit_threads

_PAUSE_S = 0.02
"""Seconds between two looks into the store."""
SAY_S = 0.25
"""Seconds between two messages of a busy first rank; `ParallelRecipe.timeout_s` is at least as long."""
T = TypeVar("T")


class Started(NamedTuple):
    """Rank and number of processes, of all hosts and of this one, as torchrun says in the environment."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def started() -> Started:
    """Read the environment; a process that torchrun did not start is alone."""

    def number(name: str, default: int) -> int:
        value = os.environ.get(name, str(default))
        if not value.isdecimal():
            raise CommError(f"the environment variable {name} is {value!r}, must be a number; start with torchrun")
        return int(value)

    size = number("WORLD_SIZE", 1)
    if size > 1 and "RANK" not in os.environ:
        raise CommError(
            f"the environment variable WORLD_SIZE is {size}, but RANK is not set; start with torchrun, or unset it to "
            "train with one process"
        )
    rank = number("RANK", 0)
    if rank >= size:
        raise CommError(
            f"the environment variable RANK is {rank}, but WORLD_SIZE is {size}: ranks are 0 … {size - 1}; start with "
            "torchrun, or unset both to train with one process"
        )
    return Started(rank, size, number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", size))


@contextmanager
def process_group(parallel: ParallelRecipe, device: str = "auto") -> Generator[Started]:
    """Join the other processes that torchrun started, if it did.

    Parameters
    ----------
    parallel
        The timeout.
    device
        Where this one will compute, as in `TrainRecipe`; of several GPUs it takes the one of its local rank.

    Raises
    ------
    CommError
        If the others cannot be met, or there are fewer GPUs than processes here.
    """
    here = started()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent("the agent of torchrun that started it")
    if here.size == 1 or dist.is_initialized():
        yield here
        return
    fit_threads(here.local_size)
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        if here.local_rank >= torch.cuda.device_count():
            raise CommError(
                f"rank {here.rank} of {here.size} is process {here.local_rank} here, but there are "
                f"{torch.cuda.device_count()} GPUs; start as many processes as there are GPUs, or set train.device cpu"
            )
        torch.cuda.set_device(here.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=parallel.timeout_s)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            shared = next(rendezvous("env://", timeout=timeout))[0]
            store = fresh_store(shared, here.rank, here.size, timeout)
            dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise CommError(
            f"rank {here.rank} of {here.size} could not meet the others at {place} within {parallel.timeout_s} s "
            f"({str(error).splitlines()[0]})"
        ) from error
    try:
        yield here
    finally:
        dist.destroy_process_group()
        gc.collect()  # models hold groups and themselves in cycles; a thread of Gloo that lets go of a tensor while
        # Python ends aborts the process ("terminate called without an active exception")


def end_groups() -> None:
    """Destroy all process groups but torch's own: for processes that make one distributed model after the other.

    Every group of Gloo has a thread that looks for messages until the group is destroyed; a few hundred of them leave
    no time for anything else. Models that were distributed before cannot be used after this.
    """
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def fresh_store(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a part of a store that only these ranks use; all must call this."""
    own, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("hotbed/attempt", own)
        answers: dict[str, str] = {}
        for other in range(1, size):
            _wait_for(store, f"hotbed/{own}/{other}", end)
            answers[str(other)] = store.get(f"hotbed/{own}/{other}").decode()
        store.set(f"hotbed/{own}/all", json.dumps(answers))
        return PrefixStore(f"hotbed/{own}", store)
    while True:
        _wait_for(store, "hotbed/attempt", end)
        attempt = store.get("hotbed/attempt").decode()
        store.set(f"hotbed/{attempt}/{rank}", own)
        if store.check([f"hotbed/{attempt}/all"]):
            answers = json.loads(store.get(f"hotbed/{attempt}/all").decode())
            if answers.get(str(rank)) == own:
                return PrefixStore(f"hotbed/{attempt}", store)
        _pause(end)


def _wait_for(store: Store, key: str, end: float) -> None:
    while not store.check([key]):
        _pause(end)


def _pause(end: float) -> None:
    if time.monotonic() > end:
        raise RuntimeError("not all of them started in time")
    time.sleep(_PAUSE_S)


# -- work of one rank --------------------------------------------------------------------------------------------------


def on_first(work: Callable[[], T]) -> T:
    """Do something on the first rank, and give all its result; all must call this.

    However long it takes: while it is done, the first rank says so to the others now and then, so that no exchange of
    theirs takes longer than ``parallel.timeout_s`` allows.
    """
    if not dist.is_initialized():
        return work()
    found: list[Any] = [None, None]
    error: Exception | None = None
    if is_first():
        with _saying_so():
            try:
                found[0] = work()
            except Exception as raised:
                error, found[1] = raised, str(raised)
    else:
        while _heard():
            pass
    dist.broadcast_object_list(found, device=torch.device("cpu"))
    if error is not None:
        raise error
    if found[1] is not None:
        raise CommError(f"rank 0 failed: {found[1]}")
    return cast("T", found[0])


@contextmanager
def _saying_so() -> Generator[None]:
    """Tell the other ranks, while the body runs, that it does, and last that it is done."""
    over = threading.Event()
    failed: list[Exception] = []

    def say() -> None:
        try:
            while not over.wait(SAY_S):
                dist.broadcast(torch.ones(1, dtype=torch.uint8), 0)
        except RuntimeError as error:  # a rank is gone
            failed.append(error)

    thread = threading.Thread(target=say, name="hotbed-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise CommError(f"rank 0: another rank has ended or not answered in time ({failed[0]})") from failed[0]
    dist.broadcast(torch.zeros(1, dtype=torch.uint8), 0)


def _heard() -> bool:
    """Wait for what the first rank says: whether it is still busy."""
    busy = torch.zeros(1, dtype=torch.uint8)
    dist.broadcast(busy, 0)
    return bool(busy)


def is_first() -> bool:
    """Whether this is the first rank."""
    return not dist.is_initialized() or dist.get_rank() == 0


# -- processes that hang, or whose agent is gone -----------------------------------------------------------------------

STATUS = 2
"""Exit status of a process that ends itself: that of an error, which torchrun takes for a failure."""
_TICKS = 20
"""Looks per limit."""
_LONGEST_TICK_S = 1.0


class Watchdog:
    """End this process if it finishes no batch for a while; a context around training or evaluation.

    A rank that hangs in code of its own (an endless loop, a file system that does not answer) waits in no exchange, so
    no timeout of Gloo ends it. Ranks that wait for it fail after ``parallel.timeout_s``, and torchrun then kills it
    without a trace. So a thread ends the process, with the stacks of all threads, once no batch was finished for
    ``train.step_limit_s``. It does not count as hanging

    - to wait for another rank: that one hangs, and ``parallel.timeout_s`` ends the wait with its number;
    - to write a checkpoint: how long that takes depends on its size;
    - time in which the process did not run at all, because it or its machine was suspended.

    Code that hangs without releasing Python's global lock stops this thread as well. So the thread sets an alarm of
    faulthandler, whose thread needs no lock, and postpones it as long as it runs; the alarm writes stacks to stderr.
    """

    def __init__(
        self,
        progress: Callable[[], int],
        limit_s: float | None,
        where: Path,
        *,
        rank: int,
        here: Callable[[], str],
        is_exempt: Callable[[], bool],
    ) -> None:
        self._progress, self._limit_s, self._file = progress, limit_s, where / f"stacks-{rank}.txt"
        self._here, self._is_exempt = here, is_exempt
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._limit_s is not None:
            self._over.clear()
            self._thread = threading.Thread(
                target=self._watch, args=(self._limit_s,), name="hotbed-watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, limit_s: float) -> None:
        tick = min(limit_s / _TICKS, _LONGEST_TICK_S)
        seen, idle_s, before = self._progress(), 0.0, time.monotonic()
        while True:
            faulthandler.dump_traceback_later(limit_s + 2 * tick, exit=True, file=2)
            if self._over.wait(tick):
                return
            now = time.monotonic()
            idle_s += min(now - before, 2 * tick)  # more has passed only where the process did not run
            before = now
            if self._progress() != seen or waits() or self._is_exempt():
                seen, idle_s = self._progress(), 0.0
            elif idle_s >= limit_s:
                self._end(limit_s)

    def _end(self, limit_s: float) -> NoReturn:
        end(
            f"{self._here()}: no batch was finished for {limit_s:g} s (train.step_limit_s); this process is in "
            f"{_innermost()}, and ends; {_write_stacks(self._file)}; raise the limit if it was only slow"
        )


def end(reason: str) -> NoReturn:
    """End this process as it is, whatever its threads do, with one message on stderr."""
    with suppress(OSError):
        os.write(2, f"hotbed: error: {reason}\n".encode())
    os._exit(STATUS)


def end_with_parent(what: str, *, every_s: float = 1.0) -> None:
    """End this process soon after its parent has ended, which nothing else would tell it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        end(f"rank {os.environ.get('RANK', '?')}: {what}, process {parent}, has ended, and this process with it")

    threading.Thread(target=watch, name="hotbed-parent", daemon=True).start()


def limit_of(recipe: Recipe, ranks: int) -> float | None:
    """Seconds without a batch after which a process is ended: the recipe's, or else, of several, the timeout."""
    if recipe.train.step_limit_s is not None:
        return recipe.train.step_limit_s
    return recipe.parallel.timeout_s if ranks > 1 else None


def _innermost() -> str:
    """The function that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no function of Python"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _write_stacks(file: Path) -> str:
    """Write the stacks of all threads to a file, or to stderr where it cannot be made; say where they are."""
    try:
        with file.open("a", encoding="utf-8") as stream:
            faulthandler.dump_traceback(stream)
            os.fsync(stream.fileno())
    except OSError as error:
        faulthandler.dump_traceback(2)
        return f"the stacks of its threads are above ({file} cannot be written: {error.strerror})"
    return f"the stacks of its threads are in {file}"


# -- processes of this machine -----------------------------------------------------------------------------------------

_SHOWN_CHARACTERS = 2000
"""Of what a process that failed has written."""


def run_local(argv: Sequence[str], ranks: int, folder: Path, *, expected: int = 0) -> None:
    """Run a program as several ranks until all have ended, or one has failed; then the others are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            place = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(argv, env=os.environ | place, stdout=log, stderr=subprocess.STDOUT))
        failed = first_failure(processes, expected)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        text = (folder / f"rank{failed}.log").read_text(encoding="utf-8", errors="replace")
        raise CommError(
            f"process {failed} of {ranks} ended with {processes[failed].returncode}: {text[-_SHOWN_CHARACTERS:]}"
        )


def first_failure(processes: Sequence[subprocess.Popen[bytes]], expected: int = 0) -> int | None:
    """Wait for the first process that ends otherwise than expected; None once all have ended so."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, expected):
                return rank
        if None not in codes:
            return None
        time.sleep(_PAUSE_S)
