"""docs/frameworks.md runs as it stands, and trains on two processes what a plain loop trains on one."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hotbed as hb
from hotbed.errors import SpecError

from .ranks import Ranks

PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"
EPOCHS, BATCH = 2, 16
State = dict[str, Tensor]


def page(*wanted: str) -> dict[str, Any]:
    """Run the first of the page's examples and those with these words; return what they define."""
    first, *others = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for example in [first, *(e for e in others if any(word in e for word in wanted))]:
        exec(example, names)
    torch.manual_seed(0)
    return names


def batches(names: dict[str, Any]) -> list[Any]:
    """The global batches of an epoch."""
    return [names["collate"](names["clicks"][k : k + BATCH]) for k in range(0, len(names["clicks"]), BATCH)]


@pytest.fixture(name="plain", scope="module")
def _plain() -> State:
    """What a loop without other tools trains, in one process."""
    names = page()
    model = names["Net"]()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01), hb.optim.RowWiseAdagrad(model, lr=0.1)]
    for ids, labels in batches(names) * EPOCHS:
        binary_cross_entropy_with_logits(model(ids), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def assert_close(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def under_torchrun(group: dist.ProcessGroup) -> Any:
    """The environment that torchrun gives a process, whose group is there already."""
    size = str(dist.get_world_size(group))
    rank = str(dist.get_rank(group))
    return patch.dict(
        os.environ,
        {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        | {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    )


def with_lightning(group: dist.ProcessGroup, checkpoint: Path) -> State:
    warnings.simplefilter("ignore")
    names = page("LightningModule")
    lightning, world = names["lightning"], dist.get_world_size(group)
    wrappers: list[object] = []
    seen = lightning.pytorch.callbacks.LambdaCallback(on_train_start=lambda t, _: wrappers.append(t.strategy.model))
    with under_torchrun(group):
        trainer = lightning.Trainer(
            callbacks=[seen],
            max_epochs=EPOCHS,
            accelerator="cpu",
            devices=world,
            strategy="ddp",
            logger=False,
            enable_checkpointing=False,
            default_root_dir=checkpoint.parent,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # which would shuffle
        )
        model = names["LitNet"]()
        sampler = torch.utils.data.DistributedSampler(names["clicks"], world, dist.get_rank(group), shuffle=False)
        data = torch.utils.data.DataLoader(
            names["clicks"], batch_size=BATCH // world, sampler=sampler, collate_fn=names["collate"]
        )
        trainer.fit(model, data)
        assert isinstance(wrappers[0], nn.parallel.DistributedDataParallel)
        trainer.save_checkpoint(checkpoint)
        return {name: t.clone() for name, t in model.net.state_dict().items()}


def averaged_by_lightning(group: dist.ProcessGroup) -> None:
    names = page("LightningModule")
    with pytest.raises(SpecError, match=r"averages of a whole LightningModule, e\.g\. by its callback"):
        torch.optim.swa_utils.AveragedModel(names["LitNet"]())
    torch.optim.swa_utils.AveragedModel(names["LitNet"]().net)


def test_lightning_on_two_processes_is_the_plain_loop(ranks: Ranks, plain: State, tmp_path: Path) -> None:
    trained, other = ranks.run(2, with_lightning, tmp_path / "two.ckpt")
    assert_close(trained, plain)
    assert all(torch.equal(other[name], value) for name, value in trained.items())
    alone = nn.ModuleDict({"net": page()["Net"]()})
    alone.load_state_dict(torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(alone["net"].state_dict()[name], value) for name, value in trained.items())
    ranks.run(2, averaged_by_lightning)


def with_accelerate(group: dist.ProcessGroup, folder: Path) -> tuple[State, State, State]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file

    names = page("accelerator")
    with under_torchrun(group):
        try:
            accelerator = Accelerator(cpu=True)
            assert accelerator.num_processes == dist.get_world_size(group)
            model = names["train"](accelerator, EPOCHS)
            trained = {name: t.clone() for name, t in accelerator.unwrap_model(model).state_dict().items()}
            accelerator.save_state(str(folder / "state"))
            accelerator.save_model(model, str(folder / "model"))
            for t in model.parameters():
                t.data.zero_()
            emptied = {name: torch.zeros_like(t) for name, t in trained.items()}
            accelerator.unwrap_model(model).load_state_dict(emptied)
            accelerator.load_state(str(folder / "state"))
            loaded = accelerator.unwrap_model(model).state_dict()
            accelerator.wait_for_everyone()
            return trained, loaded, load_file(folder / "model" / "model.safetensors")
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_on_two_processes_is_the_plain_loop(ranks: Ranks, plain: State, tmp_path: Path) -> None:
    for trained, loaded, saved in ranks.run(2, with_accelerate, tmp_path):
        assert_close(trained, plain)
        for state in (loaded, saved):
            assert state.keys() == trained.keys()
            assert all(torch.equal(state[name], value) for name, value in trained.items())


def averages(group: dist.ProcessGroup | None) -> State:
    names = page("AveragedModel")
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    share = [
        names["collate"](names["clicks"][k + rank * BATCH // size : k + (rank + 1) * BATCH // size])
        for k in range(0, len(names["clicks"]), BATCH)
    ]
    return names["train_averaged"](share, 2).module.state_dict()


def test_averages_of_two_processes_are_those_of_one(ranks: Ranks) -> None:
    expected = averages(None)
    for found in ranks.run(2, averages):
        assert_close(found, expected)


def sharded(group: dist.ProcessGroup, path: Path) -> tuple[State, State]:
    names = page("save_and_load")
    expected = {name: t.clone() for name, t in names["make"]()["model"].state_dict().items()}
    torch.manual_seed(0)
    return names["save_and_load"](path), expected


def test_a_sharded_dense_part_is_saved_whole(ranks: Ranks, tmp_path: Path) -> None:
    for found, expected in ranks.run(2, sharded, tmp_path / "checkpoint"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
