"""Models that HugeCTR saved come in: keys as ids, dense weights of a DLRM as hotbed's, others by their names."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.checkpoint import load_checkpoint, read_manifest, verify_checkpoint
from hotbed.checkpoint.importers import import_checkpoint
from hotbed.checkpoint.importers.hugectr_graph import read_graph, weights_of
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.jagged import Jagged
from hotbed.nn import DLRM
from hotbed.specs import Dynamic, Feature, Table
from tests.checkpoint import hugectr_models as models
from tests.checkpoint.peers import DENSE, Reference, assert_close, lower, random_reference


def shuffled(tables: list[Tensor], keys: Tensor) -> tuple[Tensor, Tensor]:
    """All rows of several tables, one after the other, as keys and vectors in some order."""
    vectors = torch.cat(tables)
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(1))
    return keys[order], vectors[order]


def saved_dlrm(path: Path, reference: Reference, keys: Tensor) -> Path:
    dense = [t for weight, bias in (*reference.bottom, *reference.top) for t in (weight.T.contiguous(), bias)]
    return models.save(path, models.dlrm(reference), [shuffled(reference.tables, keys)], dense)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_dlrm_gives_the_same_logits(tmp_path: Path, hashed: bool) -> None:
    reference = random_reference(padding=1)
    rows = [len(table) for table in reference.tables]
    keys = torch.arange(sum(rows))
    if hashed:
        keys = (keys * 2654435761 + 12345) % (1 << 40)
    saved_dlrm(tmp_path / "peer", reference, keys)
    import_checkpoint(tmp_path / "peer", tmp_path / "c", "hugectr", names=["all"])
    verify_checkpoint(tmp_path / "c")
    dim = reference.tables[0].shape[1]
    room = read_manifest(tmp_path / "c").tables["embeddings.all"].spec.rows
    table = Table("all", sum(rows), dim)
    if hashed:
        table = Table("all", "dynamic", dim, dynamic=Dynamic(capacity_bytes=room * dim * 4), init_bound=0.1)
    assert table.rows == room
    features = [Feature(f"slot{i}", "all") for i in range(3)]
    bottom, top = ([len(bias) for _, bias in layers] for layers in (reference.bottom, reference.top))
    model = DLRM([table], features, DENSE, bottom=bottom, top=top, seed=9)
    load_checkpoint(tmp_path / "c", {"model": model})
    dense, ids = reference.inputs()
    firsts = [sum(rows[:i]) for i in range(3)]
    raw = {f"slot{i}": keys[own + firsts[i]] for i, own in enumerate(ids)}
    with torch.no_grad():
        found = model.eval()(Batch(sparse=Jagged.from_dict(raw), dense=dense))
    assert_close(found, reference.logits(lower(reference.vectors_of(), 1)))


def test_the_last_step_counts_and_rows_without_a_key_are_initial(tmp_path: Path) -> None:
    keys, vectors = torch.tensor([5, 2, 0]), torch.randn(3, models.DIM)
    graph = models.cross()
    dense = [torch.randn(61) for _ in range(4)] + [torch.randn(61, 8), torch.ones(8), torch.randn(69, 1), torch.ones(1)]
    models.save(tmp_path / "peer", graph, [(keys, vectors * 0)], dense, step=3)
    models.save(tmp_path / "peer", graph, [(keys, vectors)], dense, step=10)
    manifest = import_checkpoint(tmp_path / "peer", tmp_path / "c", "hugectr")
    assert {name: table.spec.rows for name, table in manifest.tables.items()} == {"embeddings.sparse_embedding1": 6}
    model = nn.Module()
    model.embeddings = EmbeddingCollection(
        [Table("sparse_embedding1", 6, models.DIM)], [Feature("f", "sparse_embedding1")]
    )
    untouched = model.embeddings.weight("sparse_embedding1").clone()
    for name, shape in (("fc1", (8, 61)), ("fc2", (1, 69))):
        setattr(model, name, nn.Linear(shape[1], shape[0]))
    model.multicross1 = nn.ModuleDict(
        {k: nn.ParameterList([nn.Parameter(torch.zeros(61)) for _ in range(2)]) for k in ("weight", "bias")}
    )
    load_checkpoint(tmp_path / "c", {"model": model})
    found = model.embeddings.weight("sparse_embedding1")
    assert torch.equal(found[keys], vectors)
    assert torch.equal(found[[1, 3, 4]], untouched[[1, 3, 4]])
    assert torch.equal(model.fc1.weight, dense[4].T) and torch.equal(model.fc2.bias, dense[7])
    assert torch.equal(model.multicross1["weight"][1], dense[2]) and torch.equal(model.multicross1["bias"][0], dense[1])


def test_several_tables_of_other_dims(tmp_path: Path) -> None:
    wide, deep = (torch.arange(4), torch.randn(4, 1)), (torch.tensor([7, 1 << 60]), torch.randn(2, models.DIM))
    dense = [torch.randn(61, 24), torch.ones(24), torch.randn(24, 1), torch.ones(1)]
    models.save(tmp_path / "peer", models.wide_and_deep(), [wide, deep], dense)
    manifest = import_checkpoint(tmp_path / "peer", tmp_path / "c", "hugectr", names=["wide", "deep"])
    assert [(t.spec.name, t.spec.dim) for t in manifest.tables.values()] == [("wide", 1), ("deep", models.DIM)]
    room = manifest.tables["embeddings.deep"].spec.rows
    deep_table = Table("deep", "dynamic", models.DIM, dynamic=Dynamic(capacity_bytes=room * 64), init_bound=0.1)
    model = nn.Module()
    model.embeddings = EmbeddingCollection(
        [Table("wide", 4, 1), deep_table], [Feature("w", "wide"), Feature("d", "deep")]
    )
    model.fc1, model.fc2 = nn.Linear(61, 24), nn.Linear(24, 1)
    load_checkpoint(tmp_path / "c", {"model": model})
    found = model.eval().embeddings(Jagged.from_dict({"w": torch.tensor([2, 0]), "d": torch.tensor([1 << 60, 7])}))
    assert torch.equal(found["w"].detach(), wide[1][[2, 0]]) and torch.equal(found["d"].detach(), deep[1][[1, 0]])


def test_many_hashed_keys_find_room(tmp_path: Path) -> None:
    keys = torch.randperm(20_000, generator=torch.Generator().manual_seed(3)) * 1_000_003
    vectors = torch.randn(len(keys), models.DIM)
    dense = [torch.zeros(n) for n in (61 * 4, 61 * 8 + 8, 69 + 1)]
    models.save(tmp_path / "peer", models.cross(), [(keys, vectors)], dense)
    manifest = import_checkpoint(tmp_path / "peer", tmp_path / "c", "hugectr")
    room = manifest.tables["embeddings.sparse_embedding1"].spec.rows
    assert len(keys) < room < 3 * len(keys)


def changed(graph: dict[str, Any], number: int, **options: Any) -> dict[str, Any]:
    graph = copy.deepcopy(graph)
    graph["layers"][number] |= options
    return graph


CROSS = models.cross()
GRAPHS: dict[str, tuple[Any, str]] = {
    "no layers": ({"solver": {}}, "has no list of layers; give what HugeCTR's Model.graph_to_json writes"),
    "no data": ({"layers": CROSS["layers"][1:]}, "does not begin with a layer of type Data"),
    "unknown": (
        changed(CROSS, 5, type="GRU"),
        "has layers without counterpart in hotbed: multicross1 (GRU); build",
    ),
    "type": (changed(CROSS, 5, type=3), "has type 3, must be text"),
    "bottom": (changed(CROSS, 5, bottom="slice99"), "takes 'slice99', which no layer before it gives"),
    "names": (changed(CROSS, 5, bottom=[1]), "has [1] for what it takes or gives, must be names"),
    "width": (changed(CROSS, 6, fc_param={"num_output": "8"}), "has fc_param.num_output '8', must be an integer from"),
    "ranges": (changed(CROSS, 4, ranges=[[0, 1]]), "has ranges [[0, 1]], must be [first, last] for each top"),
    "reshape": (changed(CROSS, 2, leading_dim=47), "has leading_dim 47, which does not divide 48"),
    "slots": (changed(CROSS, 0, sparse=[{"top": "data1"}]), "must have a slot_num of at least 1"),
    "label": (changed(CROSS, 0, label=None), "has no label; give the whole graph"),
    "matrix": (changed(CROSS, 3, bottom=["sparse_embedding1", "dense"]), "which must be reshaped first"),
    "combiner": (
        changed(CROSS, 1, sparse_embedding_hparam={"embedding_vec_size": 16, "combiner": "max"}),
        "has combiner 'max', must be 'sum' or 'mean'",
    ),
    "projection": (
        changed(CROSS, 5, mc_param={"num_layers": 2, "projection_dim": 4}),
        "has a projection_dim, whose order in the dense file is not known here",
    ),
    "dense file": (changed(CROSS, 6, fc_param={"num_output": 9}), "bytes, but the layers of graph.json have"),
    "dim": (
        changed(CROSS, 1, sparse_embedding_hparam={"embedding_vec_size": 15}),
        "has leading_dim 48, which does not divide 45",
    ),
}


def cross_model(path: Path, graph: Any = CROSS, keys: Tensor | None = None) -> Path:
    own = torch.arange(4) if keys is None else keys
    dense = [torch.zeros(n) for n in (61 * 4, 61 * 8 + 8, 69 + 1)]
    return models.save(path, graph, [(own, torch.zeros(len(own), models.DIM))], dense)


def refused(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(path, path.parent / "c", "hugectr", **options)
    assert message in str(caught.value)
    assert not (path.parent / "c").exists()


@pytest.mark.parametrize(("graph", "message"), GRAPHS.values(), ids=GRAPHS)
def test_a_graph_that_cannot_be_says_why(tmp_path: Path, graph: Any, message: str) -> None:
    refused(cross_model(tmp_path / "peer", graph), message)


def test_files_that_do_not_fit_say_so(tmp_path: Path) -> None:
    refused(cross_model(tmp_path / "a", keys=torch.tensor([1, 1])), "key has the key 1 twice; a table has one row for")
    refused(cross_model(tmp_path / "b", keys=torch.tensor([1, -2])), "has the key -2; ids of hotbed's tables begin")
    refused(cross_model(tmp_path / "d"), "names has 2 entries, but there are 1 tables", names=["x", "y"])
    refused(cross_model(tmp_path / "e"), "which hugectr has none of", names={"x": "y"})
    vectors = tmp_path / "d" / "m0_sparse_20.model" / "emb_vector"
    vectors.write_bytes(vectors.read_bytes()[:-4])
    refused(tmp_path / "d", "has 32 bytes of keys and 252 of vectors, must be 8 for each key and 64 for its vector")
    vectors.unlink()
    refused(tmp_path / "d", "emb_vector is missing; copy the whole checkpoint")
    (tmp_path / "e" / "m0_sparse_20.model").rename(tmp_path / "e" / "m0_sparse_19.model")
    refused(tmp_path / "e", "has the sparse models [] of m_dense_20.model, but the graph has 1 embedding layers")
    (tmp_path / "e" / "m_dense_20.model").unlink()
    refused(tmp_path / "e", "has no file PREFIX_dense_STEP.model; give the folder that fit() saved to")
    (tmp_path / "e" / "other.json").write_text("{}")
    refused(tmp_path / "e", "has 2 .json files: graph.json, other.json; it must have one")
    refused(tmp_path / "e" / "other.json", "is a file; give the folder that has the graph and the models")
    (tmp_path / "e" / "other.json").unlink()
    (tmp_path / "e" / "graph.json").write_text("{")
    refused(tmp_path / "e", "graph.json")


def test_an_interaction_with_other_weights_is_refused(tmp_path: Path) -> None:
    reference = random_reference(padding=1)
    graph = models.dlrm(reference)
    graph["layers"].insert(-1, models.layer("BatchNorm", "bn", "top_relu0", bn_param={"factor": 1.0, "eps": 1e-5}))
    dense = [t for weight, bias in (*reference.bottom, *reference.top) for t in (weight.T.contiguous(), bias)]
    keys = torch.arange(sum(map(len, reference.tables)))
    models.save(tmp_path / "peer", graph, [shuffled(reference.tables, keys)], [*dense, torch.ones(64)])
    refused(tmp_path / "peer", "has an Interaction and weights bn.beta, bn.gamma, which hotbed's DLRM has not")


def test_what_is_written_is_json_and_little_endian(tmp_path: Path) -> None:
    """The small models are in the format that the documentation describes."""
    cross_model(tmp_path / "peer")
    folder = tmp_path / "peer" / "m0_sparse_20.model"
    assert np.fromfile(folder / "key", "<i8").tolist() == [0, 1, 2, 3]
    assert (folder / "emb_vector").stat().st_size == 4 * models.DIM * 4
    assert json.loads((tmp_path / "peer" / "graph.json").read_text())["layers"][0]["type"] == "Data"


Odd = st.sampled_from(
    [None, True, -1, 0, 2**63, 10**30, 0.5, float("nan"), "", "x", [], {}, [[]], [1], [[0, "a"]], {"top": 1}, ["data1"]]
)


@settings(max_examples=int(os.environ.get("HOTBED_FUZZ", "60")), deadline=None)
@given(st.sampled_from([models.cross, models.deepfm, models.wide_and_deep]), st.data())
def test_a_value_of_the_graph_is_another(make: Callable[[], Any], draw: st.DataObject) -> None:
    """Then it is still a graph, or a CheckpointError says what it is not."""
    graph = make()
    path = draw.draw(st.sampled_from(list(nodes(graph))))
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "graph.json"
        file.write_text(json.dumps(changed_at(graph, path, draw.draw(Odd))))
        try:
            found = read_graph(file)
            for layer in found.layers:
                weights_of(layer, found)
        except CheckpointError as error:
            assert 0 < len(str(error)) < 5000


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from nodes(inner, (*path, key))


def changed_at(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return to
    value[path[0]] = changed_at(value[path[0]], path[1:], to)
    return value
