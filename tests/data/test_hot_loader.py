import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
from data_cases import ListSource, numbered_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.batch import Batch
from hotbed.data import Loader
from hotbed.data.skew.hot_loader import HotColdLoader
from hotbed.errors import SpecError

HOT_BELOW = 1000  # samples of the hot loader have ids 0 …, those of the cold one ids 1000 …


def loader(hot: int, cold: int, *, rate: float = 50, size: int = 4, **options: Any) -> HotColdLoader:
    whole = numbered_batch(HOT_BELOW + cold)

    def of(samples: torch.Tensor) -> Loader | None:
        parts = [-(-len(samples) // 2), len(samples) // 2]
        source = ListSource(whole.take(samples), [n for n in parts if n])
        return Loader(source, "train", size, prefetch=2, **options) if len(samples) else None

    return HotColdLoader(of(torch.arange(hot)), of(HOT_BELOW + torch.arange(cold)), rate=rate)


def kind_of(batch: Batch) -> str:
    (kind,) = {"hot" if i < HOT_BELOW else "cold" for i in batch.sparse["a"].values.tolist()}  # or it is not pure
    return kind


def ids(batches: list[Batch]) -> list[int]:
    return [i for batch in batches for i in batch.sparse["a"].values.tolist()]


@settings(max_examples=25, deadline=None)
@given(
    hot=st.integers(0, 60), cold=st.integers(0, 60), rate=st.sampled_from([1, 7.5, 30, 50, 100]), shuffle=st.booleans()
)
def test_batches_are_pure_and_each_input_comes_once_per_epoch(hot: int, cold: int, rate: float, shuffle: bool) -> None:
    if hot + cold == 0:
        return
    made = loader(hot, cold, rate=rate, shuffle=shuffle)
    sizes = {"cold": math.ceil(cold / 4), "hot": math.ceil(hot / 4)}
    for _ in range(2):
        batches = list(made)
        assert len(batches) == len(made) == sum(sizes.values())
        assert sorted(ids(batches)) == [*range(hot), *range(HOT_BELOW, HOT_BELOW + cold)]
        kinds = [kind_of(batch) for batch in batches]
        left, runs = dict(sizes), [(kind, len(list(run))) for kind, run in groupby(kinds)]
        if 0 not in sizes.values():
            for kind, count in runs[:-1]:
                assert count == min(math.ceil(sizes[kind] * rate / 100), left[kind])
                left[kind] -= count
            assert runs[0][0] == "cold"
            assert runs[-1][1] == left[runs[-1][0]]


def ahead(batches: HotColdLoader) -> Iterator[tuple[Batch, dict[str, Any]]]:
    """As a trainer takes them: one more is fetched before a batch is used."""
    coming = None
    for batch in batches:
        now = batch, batches.state_dict()
        if coming is not None:
            yield coming
        coming = now
    if coming is not None:
        yield coming


def rounds(made: HotColdLoader, rates: list[float], *, look_ahead: bool) -> list[tuple[int, int]]:
    """Cold and hot batches of every round, where each sets the rate of the next."""
    found, coming = [[0, 0]], iter(rates)
    taken = ahead(made) if look_ahead else ((batch, {}) for batch in made)
    for count, (batch, _) in enumerate(taken, 1):
        found[-1][kind_of(batch) == "hot"] += 1
        if made.round_is_over(count):
            made.rate = next(coming, made.rate)
            found.append([0, 0])
    assert found.pop() == [0, 0]  # the last batch ends a round
    return [(cold, hot) for cold, hot in found]


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_rate_counts_from_the_next_round_on(look_ahead: bool) -> None:
    made = loader(40, 80, rate=50)  # 10 hot and 20 cold batches
    assert rounds(made, [10, 20, 1, 1, 50], look_ahead=look_ahead) == [(10, 5), (2, 1), (4, 2), (1, 1), (1, 1), (2, 0)]
    made.rate = 100
    assert rounds(made, [], look_ahead=look_ahead) == [(20, 10)]


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize(("hot", "cold"), [(0, 40), (40, 0)])
def test_rounds_of_one_kind(hot: int, cold: int, look_ahead: bool) -> None:
    found = rounds(loader(hot, cold, rate=30), [1, 1, 20], look_ahead=look_ahead)
    assert [sum(both) for both in found] == [3, 1, 1, 2, 2, 1]


@pytest.mark.parametrize("stop", range(1, 19))
@pytest.mark.parametrize("shuffle", [False, True])
def test_another_loader_goes_on_from_any_batch(stop: int, shuffle: bool) -> None:
    def run(made: HotColdLoader, batches: int | None, done: int = 0) -> tuple[list[list[int]], dict[str, Any]]:
        found: list[list[int]] = []
        position: dict[str, Any] = {}
        for batch, after in ahead(made):
            found.append(ids([batch]))
            position = after
            if made.round_is_over(done + len(found)):
                made.rate = {50: 20, 20: 7}.get(made.rate, 50)
            if len(found) == batches:
                break
        return found, position

    whole = loader(24, 48, shuffle=shuffle)
    first, _ = run(whole, None)
    second, _ = run(whole, None)
    assert len(first) == len(second) == 18
    stopped = loader(24, 48, shuffle=shuffle)
    before, position = run(stopped, stop)
    other = loader(24, 48, shuffle=shuffle, rate=stopped.rate)
    other.load_state_dict(position)
    after = run(other, None, stop)[0] if stop < 18 else []
    assert before + after == first
    assert run(other, None)[0] == second


def test_an_epoch_that_was_left_is_over() -> None:
    made = loader(24, 48)
    for _ in made:
        break
    assert sorted(ids(list(made))) == [*range(24), *range(HOT_BELOW, HOT_BELOW + 48)]


def test_what_cannot_be() -> None:
    with pytest.raises(SpecError, match="there is neither a hot nor a cold sample; pack a split that has samples"):
        HotColdLoader(None, None)
    for rate in (0, -1, 101):
        with pytest.raises(SpecError, match=f"rate is {rate}, must be above 0 and at most 100 percent"):
            loader(4, 4, rate=rate)
    made = loader(4, 4)
    with pytest.raises(SpecError, match="the position has epoch, must have cold, hot, given, begin, end"):
        made.load_state_dict({"epoch": 3})
    with pytest.raises(SpecError, match="there are hot samples, and there were not when the position was saved"):
        made.load_state_dict(loader(0, 4).state_dict())
    with pytest.raises(SpecError, match="there are no hot samples, and there were when the position was saved"):
        loader(0, 4).load_state_dict(made.state_dict())
    with pytest.raises(SpecError, match="the loader's position: samples: got 8"):
        made.load_state_dict(loader(8, 4).state_dict())
