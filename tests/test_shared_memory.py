"""Messages between processes of one machine arrive whole, in any order of receiving, and failures end the wait."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotbed.comm import Link, point_to_point, shared_memory, waits
from hotbed.comm.shared_memory import ADDRESS_BYTES, OwnMemory, PeerMemory
from hotbed.errors import CommError

from .ranks import ANSWER_S, Ranks

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"), reason="processes share no memory on this system"
)
SHORT = timedelta(seconds=0.3)


def memories(ranks: int = 2) -> tuple[OwnMemory, dict[int, PeerMemory]]:
    """Memory of this process, and what each rank sees of it."""
    own = OwnMemory(ranks)
    return own, {r: PeerMemory(own.address, r, SHORT) for r in range(ranks)}


TENSORS = [
    torch.arange(7),
    torch.rand(3, 5),
    torch.rand(64, 128).to(torch.bfloat16),
    torch.rand(4, 4).to(torch.float8_e4m3fn),
    torch.tensor([True, False, True]),
    torch.tensor(2.5),
    torch.rand(1, 3)[:, :1],  # contiguous for torch, though its last stride is not 1
    torch.rand(2, 2, requires_grad=True),
]


@pytest.mark.parametrize("sent", TENSORS, ids=lambda t: f"{t.dtype} {list(t.shape)}")
def test_tensors_arrive_bit_by_bit(sent: Tensor):
    own, peers = memories()
    own.send({1: sent}, peers)
    found = torch.empty_like(sent, requires_grad=False)
    peers[1].receive(peers[1].expect(), found)
    assert torch.equal(shared_memory.flat_bytes(found), shared_memory.flat_bytes(sent))


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 2), min_size=1), st.integers(1, 9000), st.booleans(), st.integers(0, 5)),
        max_size=20,
    )
)
def test_messages_may_be_taken_in_any_order_and_no_block_is_written_before_they_are(
    exchanges: list[tuple[set[int], int, bool, int]],
):
    own, peers = memories(3)
    waiting: list[tuple[int, int, Tensor]] = []
    for i, (receivers, size, is_one, taken) in enumerate(exchanges):
        whole = torch.full((size,), i)
        tensors = {r: whole if is_one else torch.full((size + r,), 100 * i + r) for r in receivers}
        own.send(tensors, peers)
        waiting += [(r, peers[r].expect(), t.clone()) for r, t in tensors.items()]
        for _ in range(min(taken, len(waiting))):
            r, number, expected = waiting.pop((7 * i) % len(waiting))
            found = torch.empty_like(expected)
            peers[r].receive(number, found)
            assert torch.equal(found, expected)
    for r, number, expected in waiting:
        found = torch.empty_like(expected)
        peers[r].receive(number, found)
        assert torch.equal(found, expected)


def test_memory_does_not_grow_while_messages_are_taken():
    own, peers = memories()
    for i in range(100):
        sent = torch.full((10_000 + 7 * i,), i)
        own.send({0: sent}, peers)
        found = torch.empty_like(sent)
        peers[0].receive(peers[0].expect(), found)
    assert len(own._blocks) <= 2  # sizes that vary a little fit into one another's blocks


def test_few_files_stay_open():
    """One per memory and one per process: limits are often 1,024, and a rank has several links to many peers."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = [memories(8) for _ in range(5)]
    for own, peers in kept:
        for i in range(8):
            own.send({i: torch.zeros(1 << (2 * i), dtype=torch.uint8)}, peers)
            peers[i].receive(peers[i].expect(), torch.empty(1 << (2 * i), dtype=torch.uint8))
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 5 + 1


def test_a_sender_waits_for_room_among_messages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_memory, "MESSAGES", 2)
    own, peers = memories()
    numbers = [peers[1].expect() for _ in range(3)]
    for i in range(2):
        own.send({1: torch.tensor([i])}, peers)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.3 s"):
        own.send({1: torch.tensor([9])}, peers)
    own, peers = memories()
    for i in range(2):
        own.send({1: torch.tensor([i])}, peers)
    found = torch.empty(1, dtype=torch.int64)
    late = threading.Timer(0.05, lambda: peers[1].receive(numbers[0], found))
    late.start()
    own.send({1: torch.tensor([2])}, peers)
    late.join()
    assert found.item() == 0
    for i, number in enumerate(numbers[1:], start=1):
        peers[1].receive(number, found)
        assert found.item() == i


def test_a_machine_without_memory_for_an_exchange_says_so(monkeypatch: pytest.MonkeyPatch):
    own, peers = memories()

    def full(file: int, first: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CommError, match=r"got 4,194,304 bytes more.*No space left"):
        own.send({1: torch.zeros(1 << 20)}, peers)
    monkeypatch.undo()
    monkeypatch.setattr(own, "_end", len(own._bytes) - 4096)
    with pytest.raises(CommError, match=r"got 4,194,304 bytes more.*bytes at most"):
        own.send({1: torch.zeros(1 << 20)}, peers)
    monkeypatch.undo()
    own.send({1: torch.arange(1 << 20)}, peers)  # nothing has changed
    found = torch.empty(1 << 20, dtype=torch.int64)
    peers[1].receive(peers[1].expect(), found)
    assert torch.equal(found, torch.arange(1 << 20))


@contextmanager
def another(then: str) -> Generator[tuple[subprocess.Popen[bytes], PeerMemory]]:
    """A process with memory of its own, which does something once a line comes; and what rank 1 sees of it."""
    code = (
        "import sys, torch; from datetime import timedelta; "
        "from hotbed.comm.shared_memory import OwnMemory, PeerMemory; "
        f"own = OwnMemory(2); print(own.address.tolist(), flush=True); sys.stdin.readline(); {then}"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = torch.tensor(json.loads(process.stdout.readline()), dtype=torch.uint8)
        yield process, PeerMemory(address, 1, timedelta(minutes=5))


def test_the_end_of_a_process_ends_the_wait():
    with another("") as (process, peer):
        process.kill()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=f"process {process.pid} has ended"):
            peer.receive(peer.expect(), torch.empty(3))
        assert time.monotonic() - start < 60


def test_threads_that_wait_for_one_process_may_ask_for_its_end_at_once():
    """Batches and gradients come from the same process, over links of their own."""
    process = shared_memory._process(os.getpid())

    def ask() -> list[bool]:
        return [process.has_ended() for _ in range(3000)]

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask) for _ in range(8)]
    assert not any(ended for found in asked for ended in found.result())


def test_what_was_sent_is_there_when_the_sender_has_ended():
    with another("own.send({1: torch.arange(9)}, {1: PeerMemory(own.address, 1, timedelta(1))})") as (process, peer):
        process.communicate(b"\n")
        assert process.returncode == 0
    found = torch.empty(9, dtype=torch.int64)
    peer.receive(peer.expect(), found)
    assert torch.equal(found, torch.arange(9))


def changed(address: Tensor, place: int) -> Tensor:
    """Another byte at a place."""
    found = address.clone()
    found[place] = 48 + (found[place] + 1) % 10
    return found


def test_memory_of_others_is_not_opened():
    address = OwnMemory(2).address  # which is gone at once
    own = OwnMemory(2)
    with pytest.raises(OSError, match="has no shared memory"):
        PeerMemory(torch.zeros(ADDRESS_BYTES, dtype=torch.uint8), 0, SHORT)
    with pytest.raises(OSError, match="on another machine"):
        PeerMemory(changed(own.address, shared_memory._KEY_BYTES), 0, SHORT)
    with pytest.raises(OSError, match="another process has that number here"):
        PeerMemory(changed(own.address, 0), 0, SHORT)
    with pytest.raises(OSError, match=r"another process has that number here|No such file"):
        PeerMemory(address, 0, SHORT)
    told = f"{shared_memory._network()} {os.getpid()} 0 ".encode()
    of_input = torch.frombuffer(bytearray(b"k" * 16 + told.ljust(48)), dtype=torch.uint8)
    with pytest.raises(OSError, match=r"another process has that number here|No such file"):
        PeerMemory(of_input, 0, SHORT)


# -- between ranks ---------------------------------------------------------------------------------------------------


def exchanged(group: dist.ProcessGroup, without: list[int]) -> tuple[Tensor, list[int]]:
    """What a rank receives of all, some of which have no memory to share, and with whom it shares it."""
    given = point_to_point._create_memory
    if dist.get_rank(group) in without:
        point_to_point._create_memory = lambda ranks: None
    try:
        link = Link(group)
        counts = [20_000] * link.size
        link.all_to_all("rows", torch.full((sum(counts),), -1), counts, counts).wait()
        handle = link.all_to_all("rows", torch.arange(sum(counts)) + 10**6 * link.rank, counts, counts)
        return handle.wait(), link.sharing
    finally:
        point_to_point._create_memory = given


@pytest.mark.parametrize("without", [[], [2], [0, 1, 2, 3]])
def test_ranks_that_share_no_memory_exchange_the_same_by_sockets(ranks: Ranks, without: list[int]):
    for rank, (rows, sharing) in enumerate(ranks.run(4, exchanged, without)):
        own = torch.arange(rank * 20_000, (rank + 1) * 20_000)
        assert torch.equal(rows, torch.cat([own + 10**6 * r for r in range(4)]))
        assert sharing == [r for r in range(4) if r != rank and r not in without and rank not in without]


def left(group: dist.ProcessGroup) -> str:
    """What a rank is told when another, with which it shares memory, does not take part any more."""
    group = dist.new_group(timeout=timedelta(seconds=ANSWER_S))
    link = Link(group)
    values = torch.arange(3)
    link.all_gather("numbers", values).wait()
    assert len(link.sharing) == link.size - 1
    link.step = 7
    if link.rank == 1:
        return ""
    handle = link.all_gather("numbers", values)
    with pytest.raises(CommError) as caught:
        handle.wait()
    with pytest.raises(CommError, match="step 7"):
        handle.wait()  # never a result after a failure
    return str(caught.value)


def test_a_rank_that_does_not_answer_is_named(ranks: Ranks):
    for rank, said in enumerate(ranks.run(4, left)):
        if rank != 1:
            assert said.startswith(f"rank {rank} of 4, step 7: the exchange of numbers failed: rank 1 has ended")
            assert f"timed out after {ANSWER_S} s" in said


def meets_nobody(group: dist.ProcessGroup) -> str:
    """What a rank is told when another does not come to the first exchange."""
    link = Link(dist.new_group(timeout=timedelta(seconds=ANSWER_S)))
    if link.rank == 1:
        time.sleep(2)  # then it ends the group
        return ""
    waiting: list[bool] = []
    looker = threading.Timer(0.5, lambda: waiting.append(waits()))
    looker.start()
    with pytest.raises(CommError) as caught:
        link.all_gather("numbers", torch.arange(3)).wait()
    looker.join()
    assert waiting == [True] and not waits()  # who watches this process does not take it for one that hangs
    return str(caught.value)


def test_a_rank_that_does_not_come_to_the_first_exchange_is_named(ranks: Ranks):
    for rank, said in enumerate(ranks.run(4, meets_nobody)):
        if rank != 1:
            assert said.startswith(f"rank {rank} of 4: the exchange of numbers failed: rank 1 has ended")
