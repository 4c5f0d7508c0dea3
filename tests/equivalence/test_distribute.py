"""`distribute` on whole models: one rank = several ranks, whatever the plan."""

from __future__ import annotations

import pytest
import torch

import hotbed as hb
from hotbed.errors import PlanError
from tests.matrix import full
from tests.ranks import Ranks

from .distributed_model import make_model, trained

SCHEMES = ("table", "row", "column", "grid", "dp", hb.Cut(rows=0, hot_rows=5))
STEPS = 20


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return trained(None, None, STEPS)


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        scale = value.abs().max()
        assert (found[name] - value).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("size", [full(1), 3, full(4)])
def test_the_model_of_several_ranks_is_that_of_one(ranks: Ranks, alone, size: int):
    first = ranks.run(size, trained, "row", STEPS)[0]
    close(first, alone)
    for scheme in SCHEMES:
        for found in ranks.run(size, trained, scheme, STEPS):
            for name, value in first.items():
                assert torch.equal(found[name], value), (scheme, name)


def run(ranks: Ranks, size: int, scheme: object, **options: object) -> list[dict[str, torch.Tensor]]:
    return ranks.run(size, _with_options, scheme, options)


def _with_options(group, scheme, options):
    return trained(group, scheme, **{"steps": STEPS, **options})


def test_batches_of_different_sizes_have_the_same_global_mean(ranks: Ranks, alone):
    for found in run(ranks, 3, "grid", sizes=(20, 0, 4)):
        close(found, alone)


def test_tables_and_parameters_on_meta_get_the_values_of_a_real_model(ranks: Ranks):
    real, meta = run(ranks, 3, "row", steps=3), run(ranks, 3, "row", steps=3, device="meta")
    for name, value in real[0].items():
        assert torch.equal(meta[0][name], value), name


def test_sharded_dense_parameters_train_the_same_model(ranks: Ranks, alone):
    found = run(ranks, 3, "table", options={"dense": "fsdp"})
    assert torch.allclose(found[0]["losses"], alone["losses"], rtol=1e-5)


@pytest.mark.parametrize(
    ("option", "bound"), [({"forward_codec": "bf16"}, 2e-2), ({"backward_codec": "int8"}, 2e-2)], ids=str
)
def test_codecs_change_the_model_a_little(ranks: Ranks, alone, option, bound):
    found = run(ranks, 3, "table", options=option, clear_of_warnings=True)[0]
    difference = (found["losses"] - alone["losses"]).abs().max()
    assert 0 < difference < bound


def test_without_a_process_group_the_model_is_returned_as_it_is():
    model = make_model()
    assert hb.distribute(model) is model
    with pytest.raises(PlanError, match=r"the plan is for 2 ranks, but torch\.distributed is not initialized"):
        hb.distribute(model, hb.make_plan(list(model.embeddings.tables.values()), 2))
