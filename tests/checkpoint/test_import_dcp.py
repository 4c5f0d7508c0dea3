"""Directories of torch.distributed.checkpoint come in, however they were sharded, by rows; nothing in them is run."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hotbed as hb
from hotbed.checkpoint import find_checkpoint, load_checkpoint, verify_checkpoint
from hotbed.checkpoint.importers import import_checkpoint
from hotbed.checkpoint.importers.dcp import dcp_arrays
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.specs import Feature, Table
from tests.checkpoint import test_import_torchrec
from tests.checkpoint.peers import assert_close, imported_logits, random_reference, refused, upper
from tests.checkpoint.test_import_bags import Ours, states
from tests.ranks import Ranks

Cut = tuple[slice, ...]


class Cuts(DefaultSavePlanner):
    """Write tensors in pieces, as the ranks of a sharded model do: ShardedTensor and DTensor make such plans."""

    def __init__(self, cuts: dict[str, Sequence[Cut]]) -> None:
        super().__init__()
        self.cuts = cuts

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            cuts = self.cuts.get(item.index.fqn)
            if cuts is None:
                items.append(item)
                continue
            tensor = self.state_dict[item.index.fqn]
            for cut in cuts:
                offsets, sizes = torch.Size(s.start for s in cut), tensor[cut].shape
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, sizes), TensorProperties.create_from_tensor(tensor), tensor.shape
                )
                items.append(WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=plan.planner_data)

    def lookup_object(self, index: MetadataIndex) -> Any:
        cuts = self.cuts.get(index.fqn)
        tensor = self.state_dict[index.fqn]
        return tensor if cuts is None else tensor[next(c for c in cuts if index.offset == tuple(s.start for s in c))]


def save(path: Path, state: dict[str, Any], cuts: dict[str, Sequence[Cut]] | None = None, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(path, **options)
        dcp.save(state, storage_writer=writer, planner=Cuts(cuts or {}), no_dist=True)
    return path


def rectangles(rows: int, cols: int, row_cuts: Sequence[int], col_cuts: Sequence[int]) -> list[Cut]:
    parts = pairwise([0, *row_cuts, rows]), pairwise([0, *col_cuts, cols])
    return list(product(*([slice(first, last) for first, last in part] for part in parts)))


CUTS = {
    "whole": None,
    "rows": {"model.embeddings.user.weight": rectangles(20, 8, [3, 4, 11], [])},
    "columns": {"model.embeddings.user.weight": rectangles(20, 8, [], [4])},
    "both, and more": {
        "model.embeddings.user.weight": rectangles(20, 8, [13], [2, 7])[::-1],
        "model.embeddings.item.weight": rectangles(30, 8, [1], []),
        "model.linear.weight": rectangles(2, 8, [1], [5]),
    },
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("one_file", [True, False])
def test_a_model_comes_in_however_it_was_sharded(
    tmp_path: Path, cuts: dict[str, Sequence[Cut]] | None, one_file: bool
) -> None:
    state = states()
    whole = {"model": state, "optimizer": {"lr": 0.1, "exp_avg.weight": torch.ones(3, 3)}, "step": 7}
    source = save(tmp_path / "peer", whole, cuts, single_file_per_rank=one_file)
    import_checkpoint(source, tmp_path / "c", "dcp", prefix="model.")
    verify_checkpoint(tmp_path / "c")
    ours = Ours()
    load_checkpoint(tmp_path / "c", {"model": ours})
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[key]), key


def test_rows_are_read_where_they_are(tmp_path: Path) -> None:
    table = torch.randn(50, 6)
    cuts = {"a": rectangles(50, 6, [20, 21], [5])}
    square = torch.randn(3, 3)
    rest = {"b": square.to(torch.bfloat16), "turned": square.t(), "n": torch.tensor(3), "none": torch.empty(0, 4)}
    arrays = dcp_arrays(save(tmp_path / "peer", {"a": table, **rest, "text": "no tensor"}, cuts))
    assert arrays.keys() == {"a", *rest}
    for first, last in ((0, 50), (19, 22), (20, 21), (49, 50), (7, 7)):
        assert torch.equal(arrays["a"].rows(first, last), table[first:last])
    for key, tensor in rest.items():
        assert torch.equal(arrays[key].whole(), tensor) and arrays[key].dtype == tensor.dtype


def test_a_map_gives_names(tmp_path: Path) -> None:
    odd = "net.emb/ä b=c.weight"
    state = {odd: torch.randn(5, 4), "other": torch.randn(6, 4), "bias": torch.ones(2)}
    source = save(tmp_path / "peer", {"model": state})
    names = {"user": f"model.{odd}", "Straße 1/2": "model.other"}
    manifest = import_checkpoint(source, tmp_path / "c", "dcp", names=names, collection="bags")
    assert set(manifest.tables) == {"bags.user", "bags.Straße 1/2"}
    collection = EmbeddingCollection(
        [Table("user", 5, 4), Table("Straße 1/2", 6, 4)], [Feature("u", "user"), Feature("s", "Straße 1/2")]
    )
    model = nn.ModuleDict({"bags": collection})
    with pytest.raises(hb.errors.CheckpointError):
        load_checkpoint(tmp_path / "c", {"model": model})  # 'bias' is no part of this model
    del state["bias"]
    import_checkpoint(save(tmp_path / "two", {"model": state}), tmp_path / "d", "dcp", names=names, collection="bags")
    load_checkpoint(tmp_path / "d", {"model": model})
    assert torch.equal(collection.weight("user"), state[odd])


def test_torchrecs_dlrm_comes_in_sharded(tmp_path: Path) -> None:
    reference = random_reference()
    names = ["t_0", "t_1", "t_2"]
    state = test_import_torchrec.state_dict(reference, names)
    key = "sparse_arch.embedding_bag_collection.embedding_bags.t_0.weight"
    cuts = {f"model.{key}": rectangles(*reference.tables[0].shape, [7], [8])}
    source = save(tmp_path / "peer", {"model": state}, cuts)
    import_checkpoint(source, tmp_path / "c", "torchrec", names=names, prefix="model.")
    expected = reference.logits(upper(reference.vectors_of()))
    assert_close(imported_logits(tmp_path / "c", reference, names), expected)


def save_sharded(group: Any, path: Path) -> None:
    mesh = init_device_mesh("cpu", (3,))
    table = torch.arange(60, dtype=torch.float32).view(15, 4)
    state = {
        "rows": distribute_tensor(table, mesh, [Shard(0)]),
        "columns": distribute_tensor(table, mesh, [Shard(1)]),
        "everywhere": distribute_tensor(table, mesh, [Replicate()]),
    }
    dcp.save(state, checkpoint_id=path)


def test_dtensors_of_three_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, save_sharded, tmp_path / "peer")
    found = dcp_arrays(tmp_path / "peer")
    assert found.keys() == {"rows", "columns", "everywhere"}
    for array in found.values():
        assert torch.equal(array.whole(), torch.arange(60, dtype=torch.float32).view(15, 4))


def change(path: Path, how: Callable[[Any], object]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    how(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/hotbed-was-here"),))


def tensor(**entries: Any) -> Callable[[Any], None]:
    """Change what the metadata has of the tensor."""
    return lambda m: vars(m.state_dict_metadata["a.weight"]).update(entries)


def stored(**entries: Any) -> Callable[[Any], None]:
    """Change where the metadata has the first chunk."""
    return lambda m: vars(m.storage_data[MetadataIndex("a.weight", torch.Size([0, 0]))]).update(entries)


def chunks(m: Any) -> Any:
    return m.state_dict_metadata["a.weight"].chunks


def shift(m: Any) -> None:
    """Let chunks overlap and leave a hole."""
    chunks(m)[1].offsets = torch.Size([1, 0])
    first = m.storage_data.pop(MetadataIndex("a.weight", torch.Size([2, 0])))
    m.storage_data[MetadataIndex("a.weight", torch.Size([1, 0]))] = first


OVERLAP = "has chunks that overlap at [0, 0]"
DAMAGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a chunk less": (lambda m: chunks(m).pop(0), "'a.weight' is [5, 4]: got 12 numbers in its chunks, expected 20"),
    "overlap": (lambda m: setattr(chunks(m)[1], "offsets", torch.Size([0, 0])), OVERLAP),
    "overlap and hole": (shift, OVERLAP),
    "outside": (tensor(size=torch.Size([4, 4])), "'a.weight' is [4, 4], but has a chunk [3, 4] at [2, 0]"),
    "dtype": (
        lambda m: setattr(m.state_dict_metadata["a.weight"].properties, "dtype", torch.float64),
        "got torch.float32 [2, 4], expected torch.float64 [2, 4]",
    ),
    "elsewhere": (stored(relative_path="../x"), "got file '../x'"),
    "cut short": (stored(length=100), "cannot be read: "),
    "transform": (stored(transform_descriptors=["zstd"]), "is transformed (['zstd'])"),
    "file": (stored(relative_path="__7_0.distcp"), "__7_0.distcp is missing"),
    "moved": (stored(offset=8), "cannot be read: "),
    "no record": (lambda m: chunks(m).insert(0, 3), ".metadata is damaged: "),
    "shape": (tensor(size=torch.Size([-1, 4])), "expected a shape"),
    "storage": (lambda m: setattr(m, "storage_data", {}), "without a file"),
    "code": (lambda m: setattr(m, "planner_data", Evil()), "got class pathlib.Path"),
}


@pytest.mark.parametrize(("how", "message"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_says_so_and_makes_nothing(tmp_path: Path, how: Any, message: str) -> None:
    source = save(tmp_path / "peer", {"a.weight": torch.ones(5, 4)}, {"a.weight": rectangles(5, 4, [2], [])})
    change(source, how)
    assert message in refused(source, "dcp")
    assert not Path("/tmp/hotbed-was-here").exists()


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (
            {"a.weight": torch.ones(2, 2)},
            {"names": {"t": "a.wieght"}},
            "key of table 't': got 'a.wieght', expected one of a.we",
        ),
        ({"a.weight": torch.ones(2, 2)}, {"prefix": "modl."}, "got 'modl.', expected one of"),
        ({"a.weight": torch.ones(2, 2).long()}, {}, "got torch.int64, expected floating point"),
        ({"a.weight": torch.ones(2)}, {"names": ["a"]}, "shape: got [2], expected"),
        ({"a": torch.ones(2, 2)}, {"names": {"x": "a", "y": "a"}}, "names: got 'a' for two tables"),
        ({"a.weight": torch.ones(2, 2, dtype=torch.complex64)}, {}, "dtype: got torch.complex64, expected one of"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, state: Any, options: Any, message: str) -> None:
    assert message in refused(save(tmp_path / "peer", state), "dcp", **options)


def test_other_places_are_refused(tmp_path: Path) -> None:
    assert "is not a directory of torch.distributed.checkpoint: it has no .met" in refused(tmp_path, "dcp")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / ".metadata").write_bytes(b"no pickle")
    assert ".metadata cannot be read: " in refused(tmp_path / "x", "dcp")
    with pytest.raises(
        CheckpointError, match=r"is a torch\.distributed\.checkpoint: use hotbed checkpoint convert … --from dcp"
    ):
        find_checkpoint(tmp_path / "x")
    assert "a list of names for tf2" in refused(tmp_path, "tf2", names={"a": "b"})
    assert "tf2 has fixed names" in refused(tmp_path, "tf2", prefix="m.")


def test_states_of_models_with_tables_are_saved_and_loaded_in_place(tmp_path: Path) -> None:
    """dcp.save and dcp.load take the state of a model on one rank as it is."""
    first: Any = hb.swap_embeddings(nn.ModuleDict({"user": nn.Embedding(9, 16), "item": nn.EmbeddingBag(5, 16)}))
    second: Any = hb.swap_embeddings(nn.ModuleDict({"user": nn.Embedding(9, 16), "item": nn.EmbeddingBag(5, 16)}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": first.state_dict()}, checkpoint_id=tmp_path / "d", no_dist=True)
        dcp.load({"model": second.state_dict()}, checkpoint_id=tmp_path / "d", no_dist=True)
        plain = nn.ModuleDict({"user": nn.Embedding(9, 16), "item": nn.EmbeddingBag(5, 16)})
        dcp.load({"model": plain.state_dict()}, checkpoint_id=tmp_path / "d", no_dist=True)
    weights: dict[str, Tensor] = {name: first[name].weight.detach() for name in ("user", "item")}
    for name, weight in weights.items():
        assert torch.equal(second[name].weight.detach(), weight) and torch.equal(plain[name].weight, weight)
