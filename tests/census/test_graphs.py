"""Captured steps train to the same bits: on the pretended device, whose graphs repeat operations, and no Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.census.cases import CASES
from tests.census.test_census import counted
from tests.matrix import full

STEPS = 12
SELECTIONS = {case.name: name for name in ("captured", "captured, other models") for case in CASES[name]}
NAMES = [case if selection == "captured" else full(case) for case, selection in SELECTIONS.items()]
BUDGET = {
    "RowWiseAdagrad fp32, ragged, lr moves": (61, 6, 1),
    "Adam int8 behind 8 fp32 rows, ragged, lr moves": (65, 7, 2),
    "RowWiseAdagrad fp32, ragged, recomputed": (98, 4, 0),
    "RowWiseAdagrad fp32, ragged, history": (256, 4, 0),
}
"""Launches of a captured step's graphs, and what the host asks for beside them: launches, copies to the device."""


@pytest.fixture(scope="module")
def selection(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a function that counts a selection once."""
    return cache(lambda name: counted(name, tmp_path_factory.mktemp("graphs"))[0])


@pytest.fixture
def found(selection: Callable[[str], dict[str, Any]], case: str) -> dict[str, Any]:
    return selection(SELECTIONS[case])[case]


@pytest.mark.parametrize("case", NAMES)
def test_replayed_steps_train_to_the_same_bits(found: dict[str, Any]) -> None:
    """Losses, rows, moments, parameters and counts after every step, while learning rates move."""
    assert found["chosen"].endswith("; steps are captured in CUDA graphs")
    assert found["same"] == STEPS


@pytest.mark.parametrize("case", NAMES)
def test_captured_steps_group_their_ids_beside_the_forward_pass(found: dict[str, Any], case: str) -> None:
    """Two sizes of batches are captured; DIN has a lookup of pooled features and one of histories."""
    assert found["beside"] == (4 if "history" in case else 2)


@pytest.mark.parametrize("case", NAMES)
def test_each_size_class_is_replayed_on_the_same_memory(found: dict[str, Any]) -> None:
    """Two numbers of samples take turns, each with a graph of its own."""
    assert sorted(found["replays"]) == [3, 5]
    assert found["eager"] == STEPS - 8
    assert found["addresses"] == [1, 1]


@pytest.mark.parametrize("case", NAMES)
def test_a_captured_step_asks_for_no_more_than_its_budget(found: dict[str, Any], case: str) -> None:
    """The host copies the batch and what has changed of the hyperparameters, and waits for nothing."""
    in_graphs, launches, copies = BUDGET[case]
    assert max(found["in_graphs"]) <= in_graphs
    assert len(found["by_host"]) == sum(found["replays"]) - len(found["in_graphs"])
    for asked in found["by_host"]:
        assert asked["launches"] <= launches
        assert asked.get("copies", 0) <= copies
        assert asked.get("allocation of page-locked memory", 0) <= copies
        assert set(asked) <= {"launches", "copies", "allocation of page-locked memory"}


@pytest.mark.parametrize("case", NAMES)
def test_streams_of_captured_steps_are_ordered(found: dict[str, Any]) -> None:
    assert found["hazards"] == []


def test_a_loss_that_is_not_finite_touches_nothing_when_it_is_replayed(
    selection: Callable[[str], dict[str, Any]],
) -> None:
    stopped = selection("captured")["stopped"]
    assert stopped["replayed"] == 4
    assert stopped["eager"] == 4
    assert stopped["error"].startswith("NonFiniteError: the loss is ")
    assert "in step 8 (epoch 0, batch 7)" in stopped["error"]
    assert "dense of sample 5 of the batch, column 3 is inf" in stopped["error"]
    assert stopped["untouched"]
    assert stopped["steps"] == stopped["rates"] == 7


@pytest.mark.full
def test_what_a_gpu_is_to_be_asked_runs_here(tmp_path: Path) -> None:
    """`benchmarks.gpu_census` trains with captured steps and without, and finds the same bits."""
    found = counted("replay", tmp_path)[0]
    assert len(found) == 4
    graphs = [of["graphs"] for of in found.values()]
    assert graphs == sorted(set(graphs))  # each case has captured some
    for of in found.values():
        assert of["same_losses"]
        assert of["same_values"]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return counted("faults", tmp_path_factory.mktemp("faults"))[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("learning rates of the dense optimizer are not written", "step 5 is another"),
        ("hyperparameters of the sparse optimizer are not written", "stream is capturing: allocation of page-locked"),
        ("places of bags are not kept", "a graph was replayed that uses memory which has been freed"),
        ("batches are not copied", "step 5 is another"),
        ("the loss is waited for", "(operation not permitted"),
        ("the stream beside is not waited for", "capturing stream has unjoined work"),
        ("the stream beside does not wait for the step", "gives work to a stream that is not"),
        ("what the stream beside reads is not kept", "is given the memory of what stream"),
        ("the model fails", "(this model is out of order)"),
        ("nothing", "nothing"),
    ],
)
def test_what_a_graph_would_get_wrong_is_found(faults: dict[str, Any], fault: str, seen: str) -> None:
    """Each is a change to the trainer, of a model that drops a lookup; the last is none, and nothing is found."""
    assert seen in faults[fault]


@pytest.mark.full
@pytest.mark.parametrize("what", ["a hook", "rows are marked"])
def test_steps_that_cannot_be_captured_are_taken_as_ever(faults: dict[str, Any], what: str) -> None:
    assert faults["left out"][what] == {"same": STEPS, "eager": STEPS, "replayed": 0}


@pytest.mark.full
@pytest.mark.parametrize(
    ("lookups", "beside"),
    [("one", 1), ("two", 2), ("one, and one without gradients", 1), ("one, of frozen tables", 0)],
)
def test_ids_are_grouped_beside_where_rows_will_be_updated(faults: dict[str, Any], lookups: str, beside: int) -> None:
    assert faults["lookups"][lookups] == {"same": STEPS, "beside": beside, "hazards": []}
