"""Two-dimensional sparse parallelism: replicas agree, and exact ones have the bits of one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotbed.optim import LAMB
from hotbed.plan import Cut
from tests.embed.replica_cases import NEVER, TABLES, Job, Model, all_trained, scaled_step
from tests.matrix import full
from tests.optim_cases import OPTIMIZERS
from tests.ranks import Ranks

MESHES = [(4, 2), full(8, 4)]
"""Ranks and replicas."""
Found = dict[str, Any]


def tensors(found: Found) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def results(ranks: Ranks, size: int, jobs: Sequence[Job]) -> list[list[Found]]:
    """By job, what each rank has."""
    by_rank = ranks.run(size, all_trained, jobs)
    return [[found[i] for found in by_rank] for i in range(len(jobs))]


def differing(found: Found, expected: Found) -> list[str]:
    a, b = tensors(found), tensors(expected)
    assert a.keys() == b.keys()
    return [name for name in b if not torch.equal(a[name], b[name])]


def assert_close(found: Found, expected: Found, bound: float = 1e-5) -> None:
    for name, value in tensors(expected).items():
        assert (tensors(found)[name] - value).abs().max() <= bound * value.abs().max(), name


def groups_of(found: list[Found]) -> dict[int, Found]:
    """What each replica has; all its ranks agree."""
    by_replica: dict[int, Found] = {}
    for one in found:
        assert not differing(one, by_replica.setdefault(one["place"][0], one))
    return by_replica


# -- averaging -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "replicas"), [*MESHES, full(8, 2)])
def test_the_mesh_has_groups_or_replicas_side_by_side(ranks: Ranks, size: int, replicas: int):
    jobs = [Job(replicas=replicas, options={"layout": layout}, steps=1) for layout in ("groups", "replicas")]
    groups, beside = ([one["place"] for one in found] for found in results(ranks, size, jobs))
    assert groups == [divmod(rank, size // replicas) for rank in range(size)]
    assert beside == [(rank % replicas, rank // replicas) for rank in range(size)]


REPLICATED = [
    Job(optimizer="RowWiseAdagrad"),
    Job(optimizer="Adam"),
    *(full(Job(dtype=dtype, scheme="table")) for dtype in ("bf16", "fp16", "int8", "fp8")),
]


@pytest.mark.parametrize("job", REPLICATED, ids=lambda job: f"{job.optimizer} {job.dtype}")
@pytest.mark.parametrize(("size", "replicas"), MESHES)
def test_replicas_have_the_same_bits_after_a_sync_and_others_before(ranks: Ranks, size: int, replicas: int, job: Job):
    job = replace(job, replicas=replicas, options={"sync_every": 2})
    before, after = results(ranks, size, [replace(job, steps=3), replace(job, steps=4)])
    apart, together = groups_of(before), groups_of(after)
    for replica in range(1, replicas):
        assert {f"{table.name}.weight" for table in TABLES} <= set(differing(apart[replica], apart[0]))
        assert not differing(together[replica], together[0])


def test_one_replica_is_plain_training_to_the_bit(ranks: Ranks):
    plain = Job(optimizer_options={"weight_decay": 0.1})
    one = replace(plain, optimizer_options={"weight_decay": 0.1, "moment_scale": 1.0})
    found, expected = results(ranks, 4, [one, plain])
    assert not differing(found[0], expected[0])


@pytest.mark.parametrize(("size", "replicas"), MESHES)
def test_sgd_that_is_averaged_after_every_step_is_sgd_of_one_group(ranks: Ranks, size: int, replicas: int):
    job = Job(optimizer="SGD", steps=5)
    found, expected = results(ranks, size, [replace(job, replicas=replicas), job])
    assert_close(found[0], expected[0])


@pytest.mark.parametrize(("size", "replicas"), [full(3, 3), (4, 4), full(8, 8)])
@pytest.mark.parametrize("optimizer", ["RowWiseAdagrad", "Adam"])
def test_replicas_that_see_the_same_samples_have_the_bits_of_one(
    ranks: Ranks, size: int, replicas: int, optimizer: str
):
    options = {"moment_scale": 1} if optimizer == "RowWiseAdagrad" else {}
    job = Job("table", replicas, {"sync_every": 2}, optimizer, options, same=True, steps=4)
    (found,), (alone,) = results(ranks, size, [job]), results(ranks, 1, [replace(job, replicas=1, options={})])
    for one in found:
        assert not differing(one, alone[0])


def test_scale_is_the_number_of_replicas_by_default(ranks: Ranks):
    job = Job(replicas=2)
    default, given = results(ranks, 4, [job, replace(job, optimizer_options={"moment_scale": 2.0})])
    (one,) = results(ranks, 4, [replace(job, optimizer_options={"moment_scale": 1.0})])
    assert not differing(default[0], given[0])
    assert differing(default[0], one[0])


@pytest.mark.parametrize(("size", "replicas"), MESHES)
def test_v_of_replicas_is_between_once_and_m_times_that_of_one_group(ranks: Ranks, size: int, replicas: int):
    """Rows hardly move, so gradients are the same ones in both; a row that one group alone has seen has M times."""
    job = Job(lr=1e-9, steps=1, options={})
    two_d, one_d = results(ranks, size, [replace(job, replicas=replicas), job])
    for table in TABLES:
        ours, theirs = (found[0][f"{table.name}.sum_of_squares"] for found in (two_d, one_d))
        assert torch.equal(ours > 0, theirs > 0)
        assert (ours >= theirs * (1 - 1e-5)).all()
        assert 1 <= ours.sum() / theirs.sum() <= replicas
        assert ((ours / theirs - replicas).abs() < 1e-4 * replicas).any()


@pytest.mark.parametrize(("size", "replicas"), MESHES)
def test_with_a_delayed_moment_a_sync_is_a_step_with_the_mean_gradient(ranks: Ranks, size: int, replicas: int):
    options = {"initial_accumulator": 0.1, "moment_scale": 2.0, "eps_inside": True}
    job = Job(steps=1, optimizer_options={**options, "delayed_moment": True})
    usual = Job(steps=1, optimizer_options=options)
    delayed, expected, other, one = results(
        ranks, size, [replace(job, replicas=replicas), job, replace(usual, replicas=replicas), usual]
    )
    for table in TABLES:
        rows = f"{table.name}.weight"
        torch.testing.assert_close(delayed[0][rows], expected[0][rows], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(other[0][rows], one[0][rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("message", ["numbers", "bitmap", "nothing"])
def test_rows_that_any_replica_touched_agree_and_others_keep_their_bits(ranks: Ranks, message: Any):
    (found,) = results(ranks, 4, [Job(replicas=2, message=message)])
    replicas = groups_of(found)
    assert not differing(replicas[0], replicas[1])  # although their ranks saw other rows
    initial = Model("fp32").embeddings.weight("big")
    assert torch.equal(found[0]["big.weight"][NEVER.start :], initial[NEVER.start :])
    assert not found[0]["big.sum_of_squares"][NEVER.start :].any()
    assert not torch.equal(found[0]["big.weight"], initial)


@pytest.mark.parametrize(("size", "replicas", "dtype"), [(4, 2, "fp32"), (4, 2, "fp8"), full(8, 4, "int8")])
def test_a_sync_of_touched_rows_is_a_sync_of_all_with_fewer_bytes(ranks: Ranks, size: int, replicas: int, dtype: str):
    job = Job("table", replicas, {"sync_every": 2}, steps=4, dtype=dtype)
    messages = ("nothing", "numbers", "bitmap", None)
    dense, *sparse = results(ranks, size, [replace(job, message=m) for m in messages])
    for found in sparse:
        assert not differing(found[0], dense[0])
        assert sum(one["sent"] for one in found) < sum(one["sent"] for one in dense)


@pytest.mark.parametrize("optimizer", ["RowWiseAdagrad", "LAMB"])
def test_all_plans_of_a_group_give_the_same_bits(ranks: Ranks, optimizer: str):
    """Also those with copies, which are brought up to date after a sync, of columns, and of any memory."""
    tiers = [Cut(rows=0, tier="host"), Cut(rows=0, hot_rows=7, tier="disk", cache_rows=3)]
    schemes = ("table", "row", "column", "grid", "dp", Cut(rows=0, hot_rows=7), *tiers)
    jobs = [Job(scheme, 2, {"sync_every": 2}, optimizer, steps=5) for scheme in schemes]
    jobs.append(replace(jobs[0], options={"sync_every": 2, "ranks_per_node": 2}))
    expected, *others = results(ranks, 8, jobs)
    for found in others:
        assert not differing(found[0], expected[0])


def test_replicas_skip_a_step_together_whose_gradients_are_not_finite_anywhere(ranks: Ranks):
    found = ranks.run(4, scaled_step, 3)
    assert found == [(True, 0)] * 4
    assert ranks.run(4, scaled_step, None) == [(False, 1)] * 4


# -- the exact mode ------------------------------------------------------------------------------------------------


EXACT = {
    **{cls.__name__: Job("column" if cls is LAMB else "row", optimizer=cls.__name__) for cls in OPTIMIZERS},
    "bf16": Job("table", dtype="bf16"),
    "int8": Job("table", dtype="int8"),
    "copies": Job("dp"),
    "pooled rows": Job("table", pooled=True),
    "pooled columns": Job("column", pooled=True),
}


@pytest.mark.parametrize(("name", "size"), [*((name, 4) for name in EXACT), full("RowWiseAdagrad", 8), full("LAMB", 8)])
def test_the_exact_mode_has_the_bits_of_one_group(ranks: Ranks, size: int, name: str):
    one = EXACT[name]
    jobs = [one, *(replace(one, replicas=m, options={"exact": True}) for m in (2, 4))]
    expected, *exact = results(ranks, size, jobs)
    for found in exact:
        assert not any(differing(of_rank, expected[0]) for of_rank in found)


@pytest.mark.parametrize("options", [{"layout": "replicas"}, full({"ranks_per_node": 2})], ids=str)
def test_the_exact_mode_has_these_bits_also_with_other_layouts_and_nodes(ranks: Ranks, options: dict[str, Any]):
    one = Job(steps=5)
    expected, found = results(ranks, 8, [one, replace(one, replicas=2, options={"exact": True, **options})])
    for of_rank in found:
        assert not differing(of_rank, expected[0])
