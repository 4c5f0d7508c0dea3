"""Hosts made of namespaces: isolation, limits, counters, what remains; skipped where the machine cannot make them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.net import check
from benchmarks.net.hosts import Hosts, NetError, RankError, available, remove_leftovers, run_ranks

ROOT = Path(__file__).parents[2]
MBIT = 40
SIZE = 2_000_000
SECONDS = SIZE * 8e-6 / MBIT

CONNECT = """
import json, socket, sys
def answer(address):
    try:
        socket.create_connection((address, int(sys.argv[1])), timeout=5).close()
        return True
    except OSError:
        return False
print(json.dumps([answer(address) for address in sys.argv[2:]]))
"""

MANY_TO_ONE = """
import json, os, socket, sys, time
rank, size, place = int(os.environ["RANK"]), int(sys.argv[1]), (os.environ["MASTER_ADDR"], 29500)
if rank == 0:
    server = socket.create_server(place)
    connections = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    got = sum(len(part) for connection in connections for part in iter(lambda: connection.recv(1 << 16), b""))
    assert got == size * len(connections)
else:
    while True:
        try:
            connection = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
start = time.monotonic()
if rank:
    connection.sendall(bytes(size))
print(json.dumps({"start": start, "end": time.monotonic()}))
"""

FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("out of luck")
time.sleep(60)
"""

HOLD = """
import time
from benchmarks.net.hosts import Hosts
with Hosts(1) as hosts:
    hosts.popen(0, ["sleep", "60"])
    print(hosts.names[0], flush=True)
    time.sleep(60)
"""


@pytest.fixture
def network():
    if (reason := available()) is not None:
        pytest.skip(reason)


needs_hosts = pytest.mark.usefixtures("network")


def python(script: str, *args: object) -> list[str]:
    return [sys.executable, "-c", script, *map(str, args)]


def ip(*args: str) -> str:
    return subprocess.run(["ip", *args], capture_output=True, text=True, check=True).stdout


def namespaces() -> set[str]:
    return {line.split()[0] for line in ip("netns", "list").splitlines()}


def interfaces() -> list[str]:
    """Of the machine itself."""
    return [link["ifname"] for link in json.loads(ip("-j", "link"))]


def own_addresses() -> list[str]:
    """IPv4 addresses of the machine itself."""
    return [place["local"] for link in json.loads(ip("-4", "-j", "address")) for place in link["addr_info"]]


def transfer(hosts: Hosts) -> float:
    """All others send `SIZE` bytes to host 0; seconds from the first byte to the last."""
    times = run_ranks(hosts, python(MANY_TO_ONE, SIZE), timeout_s=60)
    return times[0]["end"] - min(time["start"] for time in times[1:])


@pytest.mark.parametrize(("count", "mbit"), [(0, 1), (255, 1), (2, 0), (2, -1)])
def test_what_makes_no_sense(count, mbit):
    with pytest.raises(ValueError, match=r"hosts|limit"):
        Hosts(count, mbit)


def test_why_not(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in available.__wrapped__() or sys.platform != "linux"
    monkeypatch.setattr(check, "available", lambda: "no cables")
    assert check.main([]) == 1
    assert "no cables" in capsys.readouterr().err


@needs_hosts
def test_hosts_reach_each_other_and_nothing_else():
    before = interfaces()
    with Hosts(2) as hosts, socket.create_server(("", 0)) as outside:
        port = outside.getsockname()[1]
        listen = f"import socket; s = socket.create_server(('', {port})); print('ready', flush=True); s.accept()"
        listener = hosts.popen(1, python(listen), stdout=subprocess.PIPE)
        assert listener.stdout.readline() == "ready\n"
        addresses = [hosts.address(1), *own_addresses()]
        client = hosts.popen(0, python(CONNECT, port, *addresses), stdout=subprocess.PIPE)
        assert json.loads(client.communicate()[0]) == [True, *[False] * len(own_addresses())]
        assert interfaces() == before


@needs_hosts
def test_what_a_host_sends_is_limited_and_counted():
    with Hosts(2, MBIT) as hosts:
        assert hosts.sent_bytes() == [0, 0]
        assert transfer(hosts) >= 0.8 * SECONDS
        acknowledged, sent = hosts.sent_bytes()
        assert SIZE * 1514 / 1448 <= sent < SIZE * 1.1
        assert 0 < acknowledged < SIZE * 0.1


@needs_hosts
def test_what_a_host_receives_is_limited():
    with Hosts(3, MBIT) as hosts:
        assert transfer(hosts) >= 0.8 * 2 * SECONDS


@needs_hosts
def test_without_a_limit_bytes_are_counted_the_same():
    with Hosts(2) as hosts:
        transfer(hosts)
        assert SIZE * 1514 / 1448 <= hosts.sent_bytes()[1] < SIZE * 1.1


@needs_hosts
def test_ranks_are_numbered_host_by_host():
    show = "import json, os; print('noise'); print(json.dumps(dict(os.environ)))"
    with Hosts(2, ranks_per_host=2) as hosts:
        found = run_ranks(hosts, python(show), timeout_s=60, env={"OMP_NUM_THREADS": "2", "MINE": "yes"})
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MINE")
        expected = [[str(rank), str(rank % 2), "4", "2", hosts.address(0), "2", "yes"] for rank in range(4)]
        assert [[one[name] for name in names] for one in found] == expected


@needs_hosts
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_remains(error):
    def use() -> None:
        with hosts:
            assert set(hosts.names) < namespaces()
            hosts.popen(0, ["sh", "-c", "sleep 60 & sleep 60"], stdout=subprocess.PIPE)
            if error is not None:
                raise error

    hosts = Hosts(2, MBIT)
    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    assert not any(name.startswith(hosts.names[0][:-1]) for name in namespaces())


@needs_hosts
def test_what_could_not_be_made_is_removed(monkeypatch):
    monkeypatch.setattr(Hosts, "address", lambda self, host: "nowhere")
    hosts = Hosts(2, MBIT)
    with pytest.raises(NetError, match=r"`ip .*` failed: .*nowhere"), hosts:
        pass
    assert not set(hosts.names) & namespaces()


@needs_hosts
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_interrupted_or_killed(end):
    holder = subprocess.Popen(python(HOLD), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with holder:
        name = holder.stdout.readline().strip()
        remove_leftovers()
        assert name in namespaces()  # it still runs
        holder.send_signal(end)
    if end == signal.SIGKILL:
        remove_leftovers()
    assert name not in namespaces()


@needs_hosts
def test_a_rank_that_fails_is_named_and_the_others_are_killed():
    with Hosts(3) as hosts:
        with pytest.raises(RankError, match=r"(?s)rank 1 failed with exit status 1.*out of luck"):
            run_ranks(hosts, python(FAIL), timeout_s=50)
        assert [ip("netns", "pids", name) for name in hosts.names] == [""] * 3


@needs_hosts
def test_ranks_that_do_not_end_or_print_nothing():
    with Hosts(2) as hosts:
        with pytest.raises(RankError, match=r"rank 0 had not ended after 0\.5 s"):
            run_ranks(hosts, ["sleep", "60"], timeout_s=0.5)
        assert [ip("netns", "pids", name) for name in hosts.names] == [""] * 2
        with pytest.raises(RankError, match="rank 0 printed no line of JSON"):
            run_ranks(hosts, ["true"], timeout_s=60)


@needs_hosts
@pytest.mark.full
def test_the_check(tmp_path, capsys):
    file = tmp_path / "net.json"
    assert check.main(["--limits", "1000", "--rounds", "1", "--seconds", "0.2", "--json", str(file)]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert all(0 < found["limits"]["1000"][name] <= 1000 for name in check.COLUMNS)
    assert "all_to_all" in capsys.readouterr().out


def test_what_cannot_be_is_said():
    figures = {f"{name}{end}": 90.0 for name in check.COLUMNS for end in ("", "_min", "_max")}
    figures |= {"sent_ratio_tcp_min": 1.05, "sent_ratio_tcp_max": 1.05}
    assert check.wrong(100, figures) == []
    assert check.wrong(None, figures | {"tcp_max": 1e9}) == []
    mistakes = check.wrong(100, figures | {"tcp_max": 120.0, "sent_ratio_tcp_max": 2.0})
    assert [mistake.split(":")[0] for mistake in mistakes] == ["tcp", "sent_ratio_tcp_max"]
