"""Join torchrun's process group, end processes that hang, and start ranks on this machine.

`process_group` joins the group, also after torchrun has restarted processes. `watchdog` ends a process that makes no
progress. `run_local` starts several ranks for commands.

An attempt is one start of all processes by torchrun. torchrun's agent keeps one store for all attempts, so the store
contains addresses of dead ranks. New ranks would connect to these addresses, and Gloo would fail with "Connection
refused" (pytorch/pytorch#135712, #167288). ``TORCHELASTIC_RESTART_COUNT`` does not identify an attempt, because each
node counts separately. So the ranks of an attempt find each other first (`fresh_store`):

1. Rank 0 creates a random name for the attempt and writes it to the store.
2. Every other rank reads the attempt's name, which may be outdated, and writes its own random name under the attempt's
   name. The rank repeats this until it finds its own name in the list of step 3.
3. Rank 0 waits for the names under its attempt and writes a list of them. The ranks in the list belong to the attempt.

For example, two ranks restart and the store has ``attempt = a``. Rank 1 reads ``a``, writes ``a/1 = x``, finds no list
with ``x`` and looks again. Rank 0 sets ``attempt = b``, rank 1 writes ``b/1 = x``, and rank 0 sets
``b/all = {"1": "x"}``. Both use the prefix ``b`` of the store.
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
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from hotbed.comm import waits
from hotbed.config import ParallelRecipe, Recipe
from hotbed.errors import CommError
from hotbed.machine import fit_threads

_PAUSE_S = 0.02
"""Seconds between two reads of the store."""
HEARTBEAT_S = 0.25
"""Seconds between two heartbeats of the first rank in `on_first`; must be below `ParallelRecipe.timeout_s`."""
T = TypeVar("T")


class TorchrunWorld(NamedTuple):
    """Rank of this process and number of processes, as torchrun's environment defines them."""

    rank: int
    size: int
    local_rank: int  # rank among the processes of this host
    local_size: int  # number of processes of this host


def read_world() -> TorchrunWorld:
    """Read torchrun's environment variables; without them, return the world of a single process."""

    def number(name: str, default: int) -> int:
        value = os.environ.get(name, str(default))
        if not value.isdecimal():
            raise CommError(
                f"the environment variable {name} is {value!r}, expected a number. Start this program with torchrun"
            )
        return int(value)

    size = number("WORLD_SIZE", 1)
    if size > 1 and "RANK" not in os.environ:
        raise CommError(
            f"the environment variable WORLD_SIZE is {size}, but RANK is not set. Start this program with torchrun, or "
            "unset WORLD_SIZE to use one process"
        )
    rank = number("RANK", 0)
    if rank >= size:
        raise CommError(
            f"the environment variable RANK is {rank}, expected less than WORLD_SIZE {size}. Start this program with "
            "torchrun, or unset RANK and WORLD_SIZE to use one process"
        )
    return TorchrunWorld(rank, size, number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", size))


@contextmanager
def process_group(parallel: ParallelRecipe, device: str = "auto") -> Generator[TorchrunWorld]:
    """Inside the context, join the process group, if torchrun has started this process with others.

    Parameters
    ----------
    parallel
        Section ``parallel`` of the recipe, which has the timeout of exchanges.
    device
        ``train.device`` of the recipe. With CUDA, the process uses the GPU with the number of its local rank.

    Raises
    ------
    CommError
        If other ranks cannot be reached, or this host has fewer GPUs than processes.
    """
    world = read_world()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent("torchrun's agent")
    if world.size == 1 or dist.is_initialized():
        yield world
        return
    fit_threads(world.local_size)
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        if world.local_rank >= torch.cuda.device_count():
            raise CommError(
                f"rank {world.rank} of {world.size} has local rank {world.local_rank}, but this host has only "
                f"{torch.cuda.device_count()} GPUs. Start one process per GPU, or set train.device to cpu"
            )
        torch.cuda.set_device(world.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=parallel.timeout_s)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            shared = next(rendezvous("env://", timeout=timeout))[0]
            store = fresh_store(shared, world.rank, world.size, timeout)
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise CommError(
            f"rank {world.rank} of {world.size} could not reach the other ranks at {address} within "
            f"{parallel.timeout_s} s ({str(error).splitlines()[0]}). Check that all ranks run and can reach it"
        ) from error
    try:
        yield world
    finally:
        dist.destroy_process_group()
        # Models refer to groups in cycles, which only garbage collection frees. If a Gloo thread frees a tensor while
        # Python exits, the process aborts ("terminate called without an active exception").
        gc.collect()


def end_groups() -> None:
    """Destroy all process groups except torch's default group, in processes that build many distributed models.

    Each Gloo group has a thread that polls, and a few hundred threads use all CPU time. Distributed models that were
    built before cannot be used any more.
    """
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def fresh_store(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return the part of a store that only the ranks of this attempt use; all ranks must call this."""
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
        raise RuntimeError("not all ranks started in time")
    time.sleep(_PAUSE_S)


# -- work of one rank --------------------------------------------------------------------------------------------------


def on_first(work: Callable[[], T]) -> T:
    """Run ``work`` on the first rank and return its result on all ranks; all ranks must call this.

    Meanwhile the first rank sends heartbeats, so that the other ranks do not wait longer than ``parallel.timeout_s``.
    """
    if not dist.is_initialized():
        return work()
    found: list[Any] = [None, None]
    error: Exception | None = None
    if is_first():
        with _heartbeats():
            try:
                found[0] = work()
            except Exception as raised:
                error, found[1] = raised, str(raised)
    else:
        busy = torch.ones(1, dtype=torch.uint8)
        while busy:
            dist.broadcast(busy, 0)
    dist.broadcast_object_list(found, device=torch.device("cpu"))
    if error is not None:
        raise error
    if found[1] is not None:
        raise CommError(f"rank 0 failed: {found[1]}")
    return cast("T", found[0])


@contextmanager
def _heartbeats() -> Generator[None]:
    """Broadcast 1 again and again while the body runs, and then 0."""
    over = threading.Event()
    failed: list[Exception] = []

    def beat() -> None:
        try:
            while not over.wait(HEARTBEAT_S):
                dist.broadcast(torch.ones(1, dtype=torch.uint8), 0)
        except RuntimeError as error:  # a rank has ended
            failed.append(error)

    thread = threading.Thread(target=beat, name="hotbed-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise CommError(f"rank 0: another rank has ended or did not answer in time ({failed[0]})") from failed[0]
    dist.broadcast(torch.zeros(1, dtype=torch.uint8), 0)


def is_first() -> bool:
    """Return whether this is the first rank."""
    return not dist.is_initialized() or dist.get_rank() == 0


# -- processes that hang or lost their agent ---------------------------------------------------------------------------

STATUS = 2
"""Exit status of a process that ends itself; torchrun treats it as a failure."""
_TICKS = 20
"""Number of checks by `watchdog` within its time limit."""
_LONGEST_TICK_S = 1.0  # longest time between two checks


@contextmanager
def watchdog(
    progress: Callable[[], int],
    limit_s: float | None,
    where: Path,
    *,
    rank: int,
    here: Callable[[], str],
    is_exempt: Callable[[], bool],
) -> Generator[None]:
    """Inside the context, end this process if no batch is finished for ``limit_s`` seconds (None: never).

    Timeouts of Gloo do not end a rank that hangs outside of exchanges, e.g. in an endless loop or a file system. Other
    ranks fail after ``parallel.timeout_s``. torchrun then kills the hanging rank, and nothing shows where it hung. So a
    thread writes the stacks of all threads and ends the process. ``progress`` returns the number of finished batches.
    The following times do not count:

    - waits for another rank, because ``parallel.timeout_s`` limits them;
    - times in which ``is_exempt`` returns true, e.g. writes of checkpoints, because their time depends on the size;
    - times in which the process or its machine was suspended.

    Code that hangs while it holds the GIL stops this thread, too. So the thread sets a timer of faulthandler again at
    each check. The timer needs no GIL. If it is not set again in time, it writes the stacks to stderr and ends the
    process.
    """
    if limit_s is None:
        yield
        return
    over, tick = threading.Event(), min(limit_s / _TICKS, _LONGEST_TICK_S)

    def watch() -> None:
        seen, idle_s, before = progress(), 0.0, time.monotonic()
        while True:
            faulthandler.dump_traceback_later(limit_s + 2 * tick, exit=True, file=2)
            if over.wait(tick):
                return
            now = time.monotonic()
            idle_s += min(now - before, 2 * tick)  # a longer time has passed only if the process was suspended
            before = now
            if progress() != seen or waits() or is_exempt():
                seen, idle_s = progress(), 0.0
            elif idle_s >= limit_s:
                stacks = _write_stacks(where / f"stacks-{rank}.txt")
                end(
                    f"{here()}: no batch was finished within {limit_s:g} s, so this process ends. It is in "
                    f"{_innermost()}; {stacks}. Raise train.step_limit_s if the step was only slow"
                )

    thread = threading.Thread(target=watch, name="hotbed-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def end(reason: str) -> NoReturn:
    """Write one message to stderr, and end this process at once without cleaning up."""
    with suppress(OSError):
        os.write(2, f"hotbed: error: {reason}\n".encode())
    os._exit(STATUS)


def end_with_parent(parent_name: str, *, every_s: float = 1.0) -> None:
    """End this process at most about ``every_s`` seconds after its parent process has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        end(f"rank {os.environ.get('RANK', '?')}: this process ends, because {parent_name} (PID {parent}) has ended")

    threading.Thread(target=watch, name="hotbed-parent", daemon=True).start()


def limit_of(recipe: Recipe, ranks: int) -> float | None:
    """Return the seconds after which `watchdog` ends a process, or None for no limit.

    Without ``train.step_limit_s``, there is no limit for one rank. For several ranks, it is ``parallel.timeout_s``.
    """
    if recipe.train.step_limit_s is not None:
        return recipe.train.step_limit_s
    return recipe.parallel.timeout_s if ranks > 1 else None


def _innermost() -> str:
    """Return the name, file and line of the function that the main thread runs."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no Python function"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _write_stacks(file: Path) -> str:
    """Write the stacks of all threads to a file, or to stderr if that fails; return a text that names the place."""
    try:
        with file.open("a", encoding="utf-8") as stream:
            faulthandler.dump_traceback(stream)
            os.fsync(stream.fileno())
    except OSError as error:
        faulthandler.dump_traceback(2)
        return f"stacks of its threads are above ({file} cannot be written: {error.strerror})"
    return f"stacks of its threads are in {file}"


# -- processes of this machine -----------------------------------------------------------------------------------------

_SHOWN_CHARACTERS = 2000
"""An error shows this many of the last characters that a failed process has written."""


def run_local(argv: Sequence[str], ranks: int, folder: Path, *, expected: int = 0) -> None:
    """Run a program as several ranks of this machine, with their outputs in ``folder``, until all have ended.

    If a rank exits with a status that is not ``expected``, kill the other ranks and raise `CommError`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(argv, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT))
        failed = first_failure(processes, expected)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        text = (folder / f"rank{failed}.log").read_text(encoding="utf-8", errors="replace")
        raise CommError(
            f"process {failed} of {ranks} exited with {processes[failed].returncode}: {text[-_SHOWN_CHARACTERS:]}"
        )


def first_failure(processes: Sequence[subprocess.Popen[bytes]], expected: int = 0) -> int | None:
    """Wait until a rank exits with a status that is not ``expected``; return the rank, or None after all have ended."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, expected):
                return rank
        if None not in codes:
            return None
        time.sleep(_PAUSE_S)
