"""Protects: what is saved is loaded, bit for bit, and what is damaged, missing or does not fit is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotbed.checkpoint import (
    RandomState,
    blocks,
    find_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    storage,
    verify_checkpoint,
)
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.jagged import Jagged
from hotbed.optim import Adam, SparseOptimizer
from hotbed.specs import Feature, Table
from tests.checkpoint.damage import disk_is_full


class Part:
    """Any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: Any, /) -> None:
        self.state = state_dict


@pytest.mark.parametrize(("saved", "own", "after"), [(True, None, None), (None, True, None), (True, True, True)])
def test_an_optimizer_is_fused_only_where_it_was_and_can_be(
    tmp_path: Path, saved: bool | None, own: bool | None, after: bool | None
) -> None:
    def made(fused: bool | None) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        return torch.optim.Adam([weight], fused=fused)

    optimizer, other = made(saved), made(own)
    optimizer.step()
    save_checkpoint(tmp_path / "c", {"dense": optimizer}, step=1)
    load_checkpoint(tmp_path / "c", {"dense": other})
    assert other.param_groups[0]["fused"] is after
    other.step()
    assert other.state_dict()["state"][0]["step"] == 2


def test_every_plain_value_and_shape_of_state_comes_back(tmp_path: Path) -> None:
    state = {
        "nested": {"list": [1, 2.5, None, True, "x"], "tuple": (1, (2,))},
        "by_number": {0: torch.arange(3), 7: {"empty": {}}},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "infinite": float("inf"),
        "bf16": torch.ones(2, 0, dtype=torch.bfloat16),
    }
    save_checkpoint(tmp_path / "c", {"part": Part(state)})
    part = Part()
    load_checkpoint(tmp_path / "c", {"part": part})
    assert str(part.state) == str(state)


NARROW = {"user": ("int8", 0), "item": ("bf16", 5), "page": ("fp8", 1), "word": ("int8", 2), "kind": ("fp16", 0)}
"""Dtype and float32 rows of tables."""


def narrow_model(seed: int = 0) -> tuple[EmbeddingCollection, SparseOptimizer]:
    tables = [Table(name, 20, 12, dtype=dtype, fp32_rows=wide) for name, (dtype, wide) in NARROW.items()]
    model = EmbeddingCollection(tables, [Feature(name, table=name) for name in NARROW], seed=seed)
    return model, Adam(model, lr=0.05)


def train(model: EmbeddingCollection, optimizer: SparseOptimizer, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        ids = {name: torch.randint(0, 20, (8, 2), generator=draw) for name in NARROW}
        (model(Jagged.from_dict(ids)).stack() - 1).square().sum().backward()
        optimizer.step()


def bits(state: Any) -> Any:
    """Everything in a state, tensors as bytes."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), state.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(state, Mapping):
        return {key: bits(value) for key, value in state.items()}
    return [bits(value) for value in state] if isinstance(state, list | tuple) else state


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decode.weight = self.encode.weight


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_checkpoint(tmp_path / "c", {"model": model})
    saved = read_manifest(tmp_path / "c").parts["model"]
    assert saved["decode.weight"] == saved["encode.weight"] == {"$tensor": "encode.weight"}
    load_checkpoint(tmp_path / "c", {"model": other})
    assert other.decode.weight is other.encode.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_all_is_on_the_disk_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    finish, write, create = storage._LocalWriter.finish, storage.LocalDirectory.write, storage.LocalDirectory.create

    def finished(writer: Any) -> None:
        events.append(writer._path.name)
        finish(writer)

    def written(place: Any, name: str, text: str) -> None:
        events.append(name)
        write(place, name, text)

    def created(place: Any, name: str, content: bytes) -> str | None:
        events.append(name)
        return create(place, name, content)

    monkeypatch.setattr(storage._LocalWriter, "finish", finished)
    monkeypatch.setattr(storage.LocalDirectory, "write", written)
    monkeypatch.setattr(storage.LocalDirectory, "create", created)
    save_checkpoint(tmp_path / "c", {"model": narrow_model()[0]})
    assert events == ["unfinished.json", "tables-00000-00000.safetensors", "manifest.json"]
    assert sorted(f.name for f in (tmp_path / "c").iterdir()) == ["manifest.json", "tables-00000-00000.safetensors"]


def test_random_numbers_go_on(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"random": RandomState()})
    expected = torch.rand(3)
    torch.rand(5)
    load_checkpoint(tmp_path / "c", {"random": RandomState()})
    assert torch.equal(torch.rand(3), expected)


def test_every_rank_has_random_numbers_of_its_own() -> None:
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(3)]
    none = torch.empty(3, 0, dtype=torch.uint8)
    saved = RandomState(lambda own: torch.stack(states) if own.shape[1] else none, rank=1).state_dict()
    assert saved["cpu"].shape == (3, len(states[0]))
    for rank in range(5):  # of more ranks than were saved, some share
        RandomState(rank=rank).load_state_dict(saved)
        assert torch.equal(torch.get_rng_state(), states[rank % 3])


@pytest.mark.parametrize("state", [{"f": print}, {"bytes": b"x"}, {("a", "b"): 1}])
def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(CheckpointError, match="expected a tensor or a plain value"):
        save_checkpoint(tmp_path / "c", {"part": Part(state)})
    assert list(tmp_path.iterdir()) == []


def test_what_a_manifest_cannot_hold_is_refused_before_a_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"c: recipe\.3: got 3, expected text"):
        save_checkpoint(tmp_path / "c", {"part": Part({})}, recipe={3: "x"})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["write", "finish"])
def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    monkeypatch.setattr(storage._LocalWriter, when, disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path / "c", {"model": nn.Linear(2, 2)})
    assert list(tmp_path.iterdir()) == []


def test_a_killed_save_is_no_checkpoint_and_is_replaced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Killed before the manifest: all data files are there.
    path = tmp_path / "checkpoints" / "last-00000001"
    monkeypatch.setattr(storage.LocalDirectory, "remove_all", lambda _: None)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.LocalDirectory, "create", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, {"model": nn.Linear(2, 2)})
    monkeypatch.undo()
    assert sorted(f.name for f in path.iterdir()) == ["model.safetensors", "unfinished.json"]
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="has no manifest"):
        load_checkpoint(path, {"model": nn.Linear(2, 2)})
    save_checkpoint(path, {"model": narrow_model()[0]})
    assert find_checkpoint(tmp_path).path == str(path)
    verify_checkpoint(path)


def test_neither_a_checkpoint_nor_anything_else_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"exists already and contains thesis\.txt"):
        save_checkpoint(tmp_path, {"model": nn.Linear(2, 2)})
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.txt"]
    save_checkpoint(tmp_path / "c", {"part": Part({})})
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(tmp_path / "c", {"part": Part({})})


def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "c", {"model": nn.Linear(4, 2)})
    return tmp_path / "c"


def test_a_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    file = saved(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got .* bytes, expected"):
        load_checkpoint(tmp_path / "c", {"model": nn.Linear(4, 2)})
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_checkpoint(tmp_path / "c", {"model": nn.Linear(4, 2)})


def test_damage_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    file = saved(tmp_path) / "model.safetensors"
    monkeypatch.undo()  # a checkpoint says how large its blocks are
    verify_checkpoint(tmp_path / "c")
    content = bytearray(file.read_bytes())
    last = (len(content) - 1) // 64
    for block in (1, last):
        damaged = content.copy()
        damaged[block * 64] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"block {block} of {last + 1} \(bytes {block * 64:,} … "):
            load_checkpoint(tmp_path / "c", {"model": nn.Linear(4, 2)})


def test_no_changed_byte_of_any_file_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    before = [p.detach().clone() for p in model.parameters()]
    for file in sorted(saved(tmp_path).iterdir()):
        content = file.read_bytes()
        for at in range(0, len(content), 7):
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            with pytest.raises(CheckpointError):
                load_checkpoint(tmp_path / "c", {"model": model})
        file.write_bytes(content)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    load_checkpoint(tmp_path / "c", {"model": model})


def test_the_newest_checkpoint_and_the_best_are_found(tmp_path: Path) -> None:
    for name in ("last-99999999", "last-100000000", "last-00000008", "best-00000004", "best-00000002"):
        save_checkpoint(tmp_path / "checkpoints" / name, {})
    assert find_checkpoint(tmp_path).name == "last-100000000"
    assert find_checkpoint(tmp_path, best=True).name == "best-00000004"
    assert find_checkpoint(tmp_path / "checkpoints" / "last-00000008").name == "last-00000008"


def test_a_part_that_is_not_there_or_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="got part 'sparse', expected one of model"):
        load_checkpoint(tmp_path / "c", {"sparse": Part()})
    with pytest.raises(CheckpointError, match="part 'model' does not match this Linear"):
        load_checkpoint(tmp_path / "c", {"model": nn.Linear(5, 2)})
