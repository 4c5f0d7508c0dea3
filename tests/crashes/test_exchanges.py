"""A rank that dies, hangs or is slow in any exchange: the others end by themselves and name it, or wait for it."""

import json
from pathlib import Path

import pytest

from tests.crashes.campaign import Commands
from tests.crashes.exchanges import FILES, KINDS, end_of
from tests.crashes.points import DIGESTS
from tests.crashes.workloads import TRAIN

LONGER = ("--parallel.timeout_s", "3600")
"""Than a test waits: who ends, does not do so by this limit."""


@pytest.mark.full  # in short, tests/train/test_parallel.py has an exchange of rows
@pytest.mark.parametrize("exchange", KINDS)
def test_when_a_rank_dies_in_an_exchange_the_other_ends_and_names_it(
    commands: Commands, tmp_path: Path, exchange: str
) -> None:
    ended = end_of(commands, tmp_path, (*TRAIN, *LONGER), exchange, "kill")
    assert ended.codes == [2, -9], ended.said
    assert ended.blames(1), ended.said
    assert "Traceback" not in (tmp_path / "0.err").read_text()


@pytest.mark.full
@pytest.mark.parametrize("exchange", KINDS)
def test_when_a_rank_hangs_in_an_exchange_the_other_ends_after_the_timeout(
    commands: Commands, tmp_path: Path, exchange: str
) -> None:
    ended = end_of(commands, tmp_path, (*TRAIN, "--parallel.timeout_s", "25"), exchange, "stop")
    assert ended.codes == [2, -9], ended.said
    assert ended.blames(1), ended.said
    assert "Traceback" not in (tmp_path / "0.err").read_text()


@pytest.mark.full
@pytest.mark.parametrize("exchange", ["rows", "gradients of dense parameters", "rows of replicas", FILES])
def test_a_rank_that_is_slow_changes_nothing(commands: Commands, tmp_path: Path, exchange: str) -> None:
    digests: list[object] = []
    for how, number in (("slow", 3), ("slow", 1000)):  # of a thousand exchanges there are not so many
        folder = tmp_path / str(number)
        ended = end_of(commands, folder, (*TRAIN, *LONGER), exchange, how, number)
        assert ended.codes == [0, 0], ended.said
        assert (ended.seconds is not None) == (number == 3)
        digests.append(json.loads((folder / DIGESTS).read_text()))
    assert digests[0] == digests[1]
