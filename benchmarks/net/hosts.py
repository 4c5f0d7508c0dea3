"""Make hosts of network namespaces, a bridge and links of limited bandwidth, and run a rank in each.

    with Hosts(4, mbit_per_s=1000) as hosts:
        results = run_ranks(hosts, [sys.executable, "-m", "some.module"], timeout_s=60)

Theory of operation::

    namespace …-0   eth0 ═══ port0 ┐
    namespace …-1   eth0 ═══ port1 ├ bridge      ═══ a veth pair with a token bucket at both ends: eth0 limits what the
    namespace …-2   eth0 ═══ port2 ┘             host sends, and its port on the bridge limits what it receives
                             └─ namespace …-switch

The network of the machine itself is neither changed nor reachable, so several such networks can exist at a time. Names
of namespaces begin with `PREFIX`, the PID and the start time of their process. So leftovers of a killed process are
known, and are removed when the next `Hosts` is entered.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.runner import ROOT, RankError, outputs_of_ranks
from hotbed.errors import HotbedError

PREFIX = "hotbed"
INTERFACE = "eth0"
SUBNET = "10.77.0.0/24"
BURST_S = 1e-3
"""Time of the link that a token bucket holds. Less costs bandwidth on busy cores (0.5 ms: some percent at 10 Gbit/s).
With more, small exchanges pass faster than the limit."""
MIN_BURST_BYTES = 16_000  # a few frames of 1,514 bytes
QUEUE_S = 50e-3
"""Longest wait for a link before packets are dropped. Exchanges between four hosts lost none (at 5 and 20 ms some), so
times do not depend on when TCP notices."""
_numbers = itertools.count()


class NetError(HotbedError):
    """A network of namespaces could not be made."""


class Hosts:
    """Hosts that exist between ``__enter__`` and ``__exit__``.

    ``mbit_per_s`` is the limit of every link in each direction in 10⁶ bits per second with Ethernet's headers (a long
    TCP transfer carries 1,448 bytes of payload in 1,514), or None for no limit.
    """

    def __init__(self, count: int, mbit_per_s: float | None = None) -> None:
        self.count, self.mbit_per_s = count, mbit_per_s
        owner = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"
        self.names = [f"{owner}-{host}" for host in range(count)]
        self._switch = f"{owner}-switch"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        remove_leftovers()
        try:
            self._create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C waits until the end
        try:
            for process in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for name in (*self.names, self._switch):
                _remove(name)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start_rank(self, host: int, argv: Sequence[str]) -> subprocess.Popen[str]:
        """Start a process on a host, which can call ``init_process_group("gloo")``, with one OpenMP thread."""
        env = {
            "RANK": host,
            "WORLD_SIZE": self.count,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_ADDR": self._address(0),
            "MASTER_PORT": 29500,  # every namespace has ports of its own
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": 1,
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *argv],
            cwd=ROOT,
            env={**os.environ, **{name: str(value) for name, value in env.items()}},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each host has put on its link so far, with Ethernet's headers of every frame."""
        # From the queue: the interface counts up to 64 KiB as one frame.
        show = ("-s", "-j", "qdisc", "show", "dev", INTERFACE)
        queues = [json.loads(_call("tc", "-n", name, *show)) for name in self.names]
        return [int(queue["bytes"]) for of_host in queues for queue in of_host if queue.get("root")]

    def _address(self, host: int) -> str:
        return SUBNET.replace("0/24", str(host + 1))

    def _create(self) -> None:
        for name in (self._switch, *self.names):
            _call("ip", "netns", "add", name)
        # No address and no IPv6, so that only the ranks send.
        ports = ["link add name switch type bridge", "link set dev switch addrgenmode none up"]
        for host, name in enumerate(self.names):
            ports.append(f"link add name port{host} type veth peer name {INTERFACE} netns {name}")
            ports.append(f"link set dev port{host} master switch addrgenmode none up")
        _batch("ip", self._switch, ports)
        _batch("tc", self._switch, [self._queue(f"port{host}") for host in range(self.count)])
        for host, name in enumerate(self.names):
            # Always cubic: with BBR as the machine's default, up to a third of 10 Gbit/s was unused.
            links = [
                "link set dev lo up",
                f"link set dev {INTERFACE} addrgenmode none up",
                f"address add {self._address(host)}/24 dev {INTERFACE} noprefixroute",
                f"route add {SUBNET} dev {INTERFACE} congctl cubic",
            ]
            _batch("ip", name, links)
            _batch("tc", name, [self._queue(INTERFACE)])

    def _queue(self, device: str) -> str:
        """Return the command of ``tc`` that limits what leaves a device, or that only counts it."""
        if self.mbit_per_s is None:
            return f"qdisc add dev {device} root pfifo limit 10000"
        rate = self.mbit_per_s * 1e6
        burst = max(MIN_BURST_BYTES, round(rate / 8 * BURST_S))
        return f"qdisc add dev {device} root tbf rate {rate:.0f}bit burst {burst}b latency {QUEUE_S * 1e6:.0f}us"


def run_ranks(hosts: Hosts, argv: Sequence[str], timeout_s: float) -> list[Any]:
    """Run a command once per host, and return the last line that each prints, read as JSON.

    Raises
    ------
    RankError
        If a rank fails, prints no JSON, or has not ended after ``timeout_s``.
    """
    outputs = outputs_of_ranks([hosts.start_rank(host, argv) for host in range(hosts.count)], timeout_s)
    try:
        return [json.loads(output.splitlines()[-1]) for output in outputs]
    except (IndexError, ValueError):
        raise RankError(f"a rank printed no line of JSON: got {[output[-200:] for output in outputs]}") from None


@cache
def available() -> str | None:
    """Return why `Hosts` cannot be made on this machine, or None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found; install iproute2"
    try:
        with Hosts(1, 1000):
            return None
    except NetError as error:
        return str(error)


def remove_leftovers() -> None:
    """Remove namespaces whose processes have ended, and kill what runs in them."""
    for line in _call("ip", "netns", "list").splitlines():
        name = line.split()[0]
        made = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", name)
        if made is not None and _start_time(int(made[1])) != made[2]:
            _remove(name)


def _start_time(pid: int) -> str | None:
    """Return the clock ticks from boot to the start of a process, which identify it together with its PID."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return None


def _remove(name: str) -> None:
    with suppress(NetError):
        for pid in _call("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _call("ip", "netns", "delete", name)


def _call(*argv: str, stdin: str = "") -> str:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout


def _batch(tool: str, name: str, lines: Sequence[str]) -> None:
    _call(tool, "-n", name, "-batch", "-", stdin="\n".join(lines) + "\n")
