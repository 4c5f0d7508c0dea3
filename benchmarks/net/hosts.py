"""Make hosts on one machine of network namespaces, a bridge and links of limited bandwidth; run processes in them.

    with Hosts(4, mbit_per_s=1000) as hosts:
        results = run_ranks(hosts, [sys.executable, "-m", "some.module"], timeout_s=60)

Theory of operation::

    namespace …-0   eth0 ═══ port0 ┐
    namespace …-1   eth0 ═══ port1 ├ bridge      ═══ a veth pair; a token bucket at both ends: eth0 limits what the
    namespace …-2   eth0 ═══ port2 ┘             host sends, its port on the bridge what it receives
                             └─ namespace …-switch

The network of the machine itself is neither changed nor reachable, so any number of such networks can exist at a time.
Names of namespaces begin with `PREFIX`, process id and start time of the process that made them; so what a killed
process left behind is known, and removed when the next `Hosts` is entered.
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
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "hotbed"
INTERFACE = "eth0"
SUBNET = "10.77.0.0/24"
PORT = 29500
"""Of rank 0's store; every namespace has ports of its own."""

BURST_S = 1e-3
"""A token bucket holds what the link carries in this time: what may leave at once, after a pause. Less costs bandwidth
where cores are busy (0.5 ms: some percent at 10 Gbit/s), more lets small exchanges pass faster than the limit …"""

MIN_BURST_BYTES = 16_000
"""… but a few frames of 1,514 bytes at least."""

QUEUE_S = 50e-3
"""What would wait longer for its turn on a link is dropped. Of exchanges between four hosts nothing was (at 5 and 20 ms
some was), so that how long they take does not depend on when TCP notices."""

_numbers = itertools.count()


class NetError(Exception):
    """A network of namespaces could not be made."""


class RankError(Exception):
    """A rank failed or did not end in time; says which, and the end of what it wrote to stderr."""


class Hosts:
    """Hosts that exist between ``__enter__`` and ``__exit__``.

    Parameters
    ----------
    count
        Number of hosts.
    mbit_per_s
        Limit of every link in each direction, 10⁶ bits per second, Ethernet's headers included (a long TCP transfer
        carries 1,448 bytes of payload in 1,514); None for none.
    ranks_per_host
        Ranks that `run_ranks` starts on each host.

    Raises
    ------
    ValueError
        If the parameters make no sense.
    NetError
        On entering, where the machine cannot do it; `available` says so beforehand.
    """

    def __init__(self, count: int, mbit_per_s: float | None = None, *, ranks_per_host: int = 1) -> None:
        if not 1 <= count <= 254:
            raise ValueError(f"{count} hosts; {SUBNET} has addresses for 1 to 254")
        if mbit_per_s is not None and mbit_per_s <= 0:
            raise ValueError(f"a limit of {mbit_per_s} Mbit/s; give more than 0, or None for no limit")
        self.count = count
        self.mbit_per_s = mbit_per_s
        self.ranks_per_host = ranks_per_host
        owner = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"
        self.names = [f"{owner}-{host}" for host in range(count)]
        """Namespaces of the hosts, as ``ip netns`` knows them."""
        self._switch = f"{owner}-switch"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        remove_leftovers()
        try:
            self._create()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def world_size(self) -> int:
        """Ranks on all hosts together."""
        return self.count * self.ranks_per_host

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return SUBNET.replace("0/24", str(host + 1))

    def popen(
        self,
        host: int,
        argv: Sequence[str],
        *,
        local_rank: int = 0,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a process on a host, as one of the ranks that ``init_process_group("gloo")`` then joins.

        It runs in the repository's root, in a process group of its own, with one OpenMP thread unless ``env`` says
        otherwise, and is killed when the hosts are removed.

        Parameters
        ----------
        host, local_rank
            Where; ranks are numbered host by host.
        env
            Added to this process's environment, and to what ``torch.distributed`` needs.
        stdout, stderr
            As for `subprocess.Popen`.
        """
        rank = {
            "RANK": host * self.ranks_per_host + local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.ranks_per_host,
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": 1,
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *argv],
            cwd=ROOT,
            env={**os.environ, **{name: str(value) for name, value in rank.items()}, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def sent_bytes(self) -> list[int]:
        """Bytes that each host has put on its link so far, Ethernet's headers of every frame included."""
        # From the queue: the interface itself counts up to 64 KiB as one frame, unless it was cut before.
        show = ("-s", "-j", "qdisc", "show", "dev", INTERFACE)
        queues = [json.loads(_call("tc", "-n", name, *show)) for name in self.names]
        return [int(queue["bytes"]) for of_host in queues for queue in of_host if queue.get("root")]

    def _create(self) -> None:
        for name in (self._switch, *self.names):
            _call("ip", "netns", "add", name)
        # No address, no IPv6: nothing is sent that nobody asked for.
        ports = ["link add name switch type bridge", "link set dev switch addrgenmode none up"]
        for host, name in enumerate(self.names):
            ports += [
                f"link add name port{host} type veth peer name {INTERFACE} netns {name}",
                f"link set dev port{host} master switch addrgenmode none up",
            ]
        _batch("ip", self._switch, ports)
        _batch("tc", self._switch, [self._queue(f"port{host}") for host in range(self.count)])
        for host, name in enumerate(self.names):
            # Cubic whatever the machine's default is: where that was BBR, up to a third of 10 Gbit/s was unused.
            links = [
                "link set dev lo up",
                f"link set dev {INTERFACE} addrgenmode none up",
                f"address add {self.address(host)}/24 dev {INTERFACE} noprefixroute",
                f"route add {SUBNET} dev {INTERFACE} congctl cubic",
            ]
            _batch("ip", name, links)
            _batch("tc", name, [self._queue(INTERFACE)])

    def _queue(self, device: str) -> str:
        """What ``tc`` does to limit what leaves a device; without a limit, a queue that counts."""
        if self.mbit_per_s is None:
            return f"qdisc add dev {device} root pfifo limit 10000"
        rate = self.mbit_per_s * 1e6
        burst = max(MIN_BURST_BYTES, round(rate / 8 * BURST_S))
        return f"qdisc add dev {device} root tbf rate {rate:.0f}bit burst {burst}b latency {QUEUE_S * 1e6:.0f}us"

    def _close(self) -> None:
        with _uninterrupted():
            for process in self._processes:
                _kill(process)
                with process:  # closes its pipes and waits
                    pass
            self._processes.clear()
            for name in (*self.names, self._switch):
                _remove(name)


def run_ranks(hosts: Hosts, argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
    """Run a command once per rank, until all have ended.

    Returns
    -------
    list
        By rank: its last line on stdout, read as JSON.

    Raises
    ------
    RankError
        If a rank fails (the first that does is named), prints no JSON, or has not ended after ``timeout_s``. By then
        all others are killed.
    """
    pipe = subprocess.PIPE
    places = [(host, local) for host in range(hosts.count) for local in range(hosts.ranks_per_host)]
    ranks = [hosts.popen(host, argv, local_rank=local, env=env, stdout=pipe, stderr=pipe) for host, local in places]
    failed: int | None = None
    late: list[int] = []
    with ThreadPoolExecutor(len(ranks)) as readers:
        outputs = [readers.submit(process.communicate) for process in ranks]
        try:
            ended = (outputs.index(output) for output in as_completed(outputs, timeout_s))
            failed = next((rank for rank in ended if ranks[rank].returncode != 0), None)
        except TimeoutError:
            late = [rank for rank, output in enumerate(outputs) if not output.done()]
        finally:
            for process in ranks:
                _kill(process)
    written = [output.result() for output in outputs]
    if failed is not None:
        raise _rank_error(failed, f"failed with exit status {ranks[failed].returncode}", written[failed][1])
    if late:
        others = f", nor had {late[1:]}" if late[1:] else ""
        raise _rank_error(late[0], f"had not ended after {timeout_s} s{others}", written[late[0]][1])
    results: list[Any] = []
    for rank, (out, err) in enumerate(written):
        try:
            results.append(json.loads(out.splitlines()[-1]))
        except (IndexError, ValueError):
            raise _rank_error(rank, f"printed no line of JSON but {out[-200:]!r}", err) from None
    return results


@cache
def available() -> str | None:
    """Why there can be no `Hosts` here, in words; None if there can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found; install iproute2"
    try:
        with Hosts(1, 1000):
            return None
    except NetError as error:
        return str(error)


def remove_leftovers() -> list[str]:
    """Remove namespaces whose makers have ended without doing so, and what runs in them; returns their names."""
    removed: list[str] = []
    for line in _call("ip", "netns", "list").splitlines():
        name = line.split()[0]
        made = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", name)
        if made is not None and _start_time(int(made[1])) != made[2]:
            _remove(name)
            removed.append(name)
    return removed


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process: with its id, its name for as long as the machine runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[19]


def _remove(name: str) -> None:
    """Kill all that runs in a namespace and remove it; nothing if it is gone."""
    with suppress(NetError):
        for pid in _call("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _call("ip", "netns", "delete", name)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that `Hosts.popen` started, with its process group."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _rank_error(rank: int, what: str, stderr: str) -> RankError:
    return RankError(f"rank {rank} {what}; its stderr ends with:\n{stderr[-4000:]}")


def _call(*argv: str, stdin: str = "") -> str:
    """What a command prints; `NetError` if it fails."""
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout


def _batch(tool: str, name: str, lines: Sequence[str]) -> None:
    """Several commands of ``ip`` or ``tc`` in a namespace."""
    _call(tool, "-n", name, "-batch", "-", stdin="\n".join(lines) + "\n")


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Ctrl-C waits until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
