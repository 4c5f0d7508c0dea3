"""The time to a logloss is read off curves, and sides train what they say; seconds mean nothing at such sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import hotbed as hb
from benchmarks.peers.plain_side import PlainLayers
from benchmarks.time_to_quality import __main__ as command
from benchmarks.time_to_quality.logs import Log, planted, save
from benchmarks.time_to_quality.parameter_server import Server
from benchmarks.time_to_quality.sides import EPS, Hotbed, HotbedBf16, Plain, Point, Rates, curve

RATES = Rates(0.004, 0.02)


def small(samples: int = 3 * 4_096) -> Log:
    log = planted(samples, 2_048, 0)
    return replace(log, every=2)


def test_seconds_are_read_off_straight_lines() -> None:
    points = [Point(10, 1.0, 0.6), Point(20, 2.0, 0.5), Point(30, 3.0, 0.55), Point(40, 4.0, 0.45)]
    assert command.seconds_to(points, 0.7) == 1.0
    assert command.seconds_to(points, 0.55) == pytest.approx(1.5)
    assert command.seconds_to(points, 0.46) == pytest.approx(3.9)
    assert command.seconds_to(points, 0.44) is None


def test_a_target_is_what_the_worst_run_reaches() -> None:
    curves = {"a": [[Point(1, 1.0, 0.5), Point(2, 2.0, 0.6)], [Point(1, 1.0, 0.4)]], "b": [[Point(1, 1.0, 0.45)]]}
    assert command.reached_by_all(curves) == 0.5


@pytest.mark.parametrize("side", [Hotbed, HotbedBf16, Plain])
def test_a_side_learns(side: type[Hotbed | Plain]) -> None:
    log = small()
    points = curve(side(log, RATES, 0), log)
    assert [point.samples for point in points] == [2 * 4_096, 3 * 4_096]
    assert points[-1].logloss < F.binary_cross_entropy(torch.tensor(0.5), torch.tensor(1.0)).item()
    assert 0 < points[0].seconds < points[1].seconds


def test_sides_begin_with_one_model() -> None:
    log = small()
    own, plain = Hotbed(log, RATES, 3), Plain(log, RATES, 3)
    torch.testing.assert_close(own.logits(log.test[0]), plain.logits(log.test[0]))


def test_the_server_updates_rows_as_rowwise_adagrad_does(tmp_path: Path) -> None:
    log = small()
    save(log, tmp_path / "log.pt")
    own = Hotbed(log, RATES, 0)
    tables = hb.optim.RowWiseAdagrad(own.model, lr=RATES.tables, eps=EPS)
    server, layers = Server(tmp_path / "log.pt", RATES, 0, 1), PlainLayers(log.dlrm(0))
    for batch in log.train[:2]:
        rows = server.look_up(batch.ids).requires_grad_()
        F.binary_cross_entropy_with_logits(layers(batch.dense, rows.unbind()), batch.labels).backward()
        assert rows.grad is not None
        server.update(batch.ids, rows.grad)
        loss = F.binary_cross_entropy_with_logits(own.logits(batch), batch.labels)
        tables.zero_grad()
        loss.backward()
        tables.step()
    expected = torch.cat([own.model.embeddings.weight(name).detach() for name in log.names])
    torch.testing.assert_close(server.rows, expected, rtol=1e-5, atol=1e-6)


def test_the_center_moves_towards_replicas(tmp_path: Path) -> None:
    save(small(4_096), tmp_path / "log.pt")
    server = Server(tmp_path / "log.pt", RATES, 0, 2)
    before = server.center.clone()
    moved = server.average(before + 1)
    torch.testing.assert_close(moved, torch.full_like(moved, 0.45), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(server.center, before + 0.45)


@pytest.mark.full
def test_the_command_measures_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--samples", "65536", "--seeds", "1", "--json", str(tmp_path / "found.json")]
    command.main(argv)
    first = (tmp_path / "found.json").read_text(encoding="utf-8")
    sides = json.loads(first)["logs"]["planted"]
    assert {"hotbed", "plain PyTorch", "parameter server, 1 trainer", "parameter server, 2 trainers"} <= set(sides)
    assert all(len(of["pilot"]) == 3 and len(of["curves"]) == 1 for of in sides.values())
    command.main(argv)  # nothing is measured again
    assert json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["logs"] == json.loads(first)["logs"]
    assert "lowest logloss" in capsys.readouterr().out
