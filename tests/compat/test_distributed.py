"""Protects: planners, sharders and pipelines of TorchRec's names do what scripts expect of them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import hotbed as hb
from hotbed.compat.torchrec import (
    CommType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    QCommsConfig,
    ShardingEnv,
    ShardingType,
    Topology,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    get_qcomm_codecs_registry,
)
from hotbed.embed import Distributed
from hotbed.errors import SpecError
from tests.ranks import Ranks

IDS = KeyedJaggedTensor(["f1", "f2"], torch.tensor([1, 2, 3, 3]), lengths=torch.tensor([1, 1, 1, 1]))


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(12, 32, "t1", feature_names=["f1"]),
            EmbeddingBagConfig(12, 32, "t2", feature_names=["f2"]),
        ],
        device="meta",
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ebc = collection()
        self.over = nn.Linear(64, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss = (self.over(self.ebc(features).values()) - 1).square().mean()
        return loss, loss.detach()


@pytest.mark.parametrize(
    ("kind", "rows", "cols"),
    [
        (ShardingType.TABLE_WISE, 12, 32),
        (ShardingType.ROW_WISE, 4, 32),
        (ShardingType.TABLE_ROW_WISE, 4, 32),
        (ShardingType.COLUMN_WISE, 12, 16),
    ],
)
def test_constraints_choose_how_tables_are_cut(kind: ShardingType, rows: int, cols: int) -> None:
    constraints = {"t1": ParameterConstraints(sharding_types=[kind.value], pooling_factors=[2.0])}
    planner = EmbeddingShardingPlanner(topology=Topology(3, "cpu", ddr_cap=1 << 30), constraints=constraints)
    plan = planner.plan(Model(), [EmbeddingBagCollectionSharder()])
    first = plan.by_table["t1"][0]
    assert plan.world_size == 3 and (len(first.rows), len(first.cols)) == (rows, cols)
    assert all(
        tile.readers
        for tile in EmbeddingShardingPlanner(
            Topology(3, "cpu"), constraints={t: ParameterConstraints(["data_parallel"]) for t in ("t1", "t2")}
        )
        .plan(Model())
        .tiles
    )


def planned(group: ProcessGroup, plan: bool) -> tuple[int, dict[str, Tensor]]:
    """Train by a searched plan, or the default one; return the number of the plan's ranks, and the state."""
    model = Model()
    planner = EmbeddingShardingPlanner(batch_size=2)
    found = planner.collective_plan(model, [EmbeddingBagCollectionSharder()], group) if plan else None
    env = ShardingEnv.from_process_group(group)
    parallel = DistributedModelParallel(
        model, env=env, plan=found, sharders=[EmbeddingBagCollectionSharder()], init_parameters=True
    )
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
    pipeline = TrainPipelineSparseDist(parallel, optimizer, torch.device("cpu"))
    batches = iter([IDS, IDS, IDS])
    for _ in range(3):
        pipeline.progress(batches)
    assert parallel.plan.world_size == env.world_size and parallel.device == torch.device("cpu")
    return parallel.plan.world_size, {name: value.clone() for name, value in parallel.state_dict().items()}


def test_plans_of_the_planner_train_the_same_model(ranks: Ranks) -> None:
    for (size, state), (_, other) in zip(ranks.run(3, planned, True), ranks.run(3, planned, False), strict=True):
        assert size == 3
        torch.testing.assert_close(state, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist])
def test_pipelines_take_the_steps_of_a_loop(kind: type[TrainPipelineBase]) -> None:
    made = [Model(), Model()]
    models = [DistributedModelParallel(model, plan="table") for model in made]
    optimizers = [torch.optim.Adam(own.over.parameters(), lr=0.1) for own in made]
    batches = [IDS.permute([0, 1]) for _ in range(3)]
    expected: list[float] = []
    for batch in batches:
        optimizers[0].zero_grad()
        loss, _ = models[0](batch)
        loss.backward()
        optimizers[0].step()
        expected.append(float(loss.detach()))
    pipeline = kind(models[1], optimizers[1], torch.device("cpu"))
    source = iter(batches)
    assert [float(pipeline.progress(source)) for _ in batches] == expected
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    models[1].eval()
    before = {name: value.clone() for name, value in models[1].state_dict().items()}
    pipeline.progress(iter(batches))
    torch.testing.assert_close(dict(models[1].state_dict()), before, rtol=0, atol=0)
    pipeline.reset()
    calls: list[Any] = []
    other = kind(models[1], optimizers[1], "cpu", custom_model_fwd=lambda batch: (calls.append(batch), calls)[1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unpack"):
        other.progress(iter(batches))
    assert calls


def test_sharders_have_optimizers_and_number_formats() -> None:
    fused = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.3, "eps": 1e-6}
    parallel = DistributedModelParallel(Model(), sharders=[EmbeddingBagCollectionSharder(fused_params=fused)])
    (group,) = parallel.fused_optimizer.param_groups
    assert (group["lr"], group["eps"]) == (0.3, 1e-6)
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    sharders = [
        kind(qcomm_codecs_registry=get_qcomm_codecs_registry(config))
        for kind in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)
    ]
    parallel = DistributedModelParallel(Model(), sharders=sharders)
    options = cast("Distributed", parallel.module).wire.options
    assert (options.forward_codec, options.backward_codec) == ("fp16", "bf16")
    ec = EmbeddingCollection([EmbeddingConfig(12, 32, "t1", feature_names=["f1"])], device="meta")
    adam = EmbeddingCollectionSharder(fused_params={"optimizer": "adam", "beta1": 0.8, "learning_rate": 0.1})
    (group,) = DistributedModelParallel(ec, sharders=[adam]).fused_optimizer.param_groups
    assert group["betas"] == (0.8, 0.999)
    assert hb.Plan.from_json(parallel.plan.to_json()) == parallel.plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ParameterConstraints(sharding_types=["diagonal"]).scheme("t1"),
            "sharding_types: got 'diagonal', expected one of data_parallel",
        ),
        (lambda: ParameterConstraints(compute_kernels=["fused_uvm"]).scheme("t1"), "compute_kernels: got 'fused_uvm'"),
        (
            lambda: EmbeddingShardingPlanner(constraints={"t9": ParameterConstraints()}).plan(Model()),
            "table in constraints: got 't9', expected one of t1, t2",
        ),
        (
            lambda: DistributedModelParallel(Model(), env=ShardingEnv.from_local(8, 0)),
            "got 8 ranks, expected all 1",
        ),
        (
            lambda: DistributedModelParallel(
                Model(), sharders=[EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.2})]
            ),
            "fused_params: got 'cache_load_factor'",
        ),
        (
            lambda: DistributedModelParallel(
                Model(), sharders=[EmbeddingBagCollectionSharder(fused_params={"optimizer": "lars"})]
            ),
            "optimizer in fused_params: got 'lars'",
        ),
        (
            lambda: DistributedModelParallel(
                Model(),
                sharders=[
                    EmbeddingBagCollectionSharder(qcomm_codecs_registry=QCommsConfig(precision))
                    for precision in (CommType.FP16, CommType.BF16)
                ],
            ),
            "qcomm_codecs_registry of sharders: got 2",
        ),
    ],
)
def test_what_has_no_counterpart_says_why(make: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
