"""Measure exchanges as one rank; print its seconds as one line of JSON.

python -m benchmarks.net.worker tcp BYTES
python -m benchmarks.net.worker gloo BYTES_PER_PEER STEPS
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable

CHUNK = 1 << 20
PATIENCE_S = 30
WARMUP = 2
"""Exchanges before the clock starts: TCP's windows grow."""


def tcp(size: int) -> dict[str, float]:
    """Rank 1 sends ``size`` bytes to rank 0 over one connection; seconds until rank 0 has said that it has them all."""
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    buffer = memoryview(bytearray(CHUNK))
    if os.environ["RANK"] == "0":
        with socket.create_server(place) as server, server.accept()[0] as connection:
            start = time.perf_counter()
            while size > 0:
                size -= connection.recv_into(buffer[:size])
            connection.sendall(b"!")
            return {"tcp": time.perf_counter() - start}
    with connected(place) as connection:
        start = time.perf_counter()
        while size > 0:
            size -= connection.send(buffer[:size])
        if connection.recv(1) != b"!":
            raise ConnectionError("rank 0 closed the connection before it had everything")
        return {"tcp": time.perf_counter() - start}


def connected(place: tuple[str, int]) -> socket.socket:
    """A connection to a server that may still be starting."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(place, timeout=PATIENCE_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def gloo(size: int, steps: int) -> dict[str, float]:
    """Every rank sends ``size`` bytes to every rank, ``WARMUP + steps`` times; seconds of the last ``steps``.

    Once with ``all_to_all_single``, once with `Link.exchange`: receives before sends. Gloo sends a message when the
    receiver has announced its buffer, and the announcement waits behind what the receiver itself is sending to that
    rank. ``all_to_all_single`` sends first: of two ranks, the one that comes later holds the other one up until its own
    message is through, so a link carries one direction at a time.
    """
    import torch
    import torch.distributed as dist

    from hotbed.comm import Link

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    send = torch.full((ranks, size), rank, dtype=torch.uint8)
    received = torch.empty_like(send)
    link = Link()

    def all_to_all() -> None:
        dist.all_to_all_single(received, send)

    def receives_first() -> None:
        link.exchange("bytes", list(send), list(received)).wait()

    def seconds(exchange: Callable[[], None]) -> float:
        received.fill_(255)
        for _ in range(WARMUP):
            exchange()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            exchange()
        taken = time.perf_counter() - start
        if not torch.equal(received, torch.arange(ranks, dtype=torch.uint8)[:, None].expand(-1, size)):
            raise RuntimeError(f"rank {rank} received something else than was sent")
        dist.barrier()
        return taken

    found = {"all_to_all": seconds(all_to_all), "receives_first": seconds(receives_first)}
    dist.destroy_process_group()
    return found


def main() -> None:
    """Do what the command line says."""
    kind, *numbers = sys.argv[1:]
    print(json.dumps({"tcp": tcp, "gloo": gloo}[kind](*map(int, numbers))))


if __name__ == "__main__":
    main()
