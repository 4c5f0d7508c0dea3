"""Protects: whatever another library's files hold, importing works or ends with a CheckpointError, and makes nothing.

Files that were right are changed in one place: a value inside, or bytes. ``HOTBED_FUZZ=5000`` looks further.
"""

from __future__ import annotations

import copy
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hotbed.checkpoint.importers import Peer, import_checkpoint
from hotbed.checkpoint.manifest import read_manifest
from hotbed.errors import CheckpointError
from tests.checkpoint import (
    test_import_dcp,
    test_import_facebook,
    test_import_nvidia,
    test_import_torchrec,
)
from tests.checkpoint.peers import random_reference, refused

EXAMPLES = int(os.environ.get("HOTBED_FUZZ", "40"))
Fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
WIDE = torch.zeros(1).expand(10**6, 10**6)
"""4 TB of one number."""


def facebook(path: Path) -> Path:
    path.mkdir()
    losses = {"train_loss": np.float64(0.5), "nbatches": 3}
    torch.save({"state_dict": test_import_facebook.state_dict(random_reference()), **losses}, path / "model.pt")
    return path / "model.pt"


def torchrec(path: Path) -> Path:
    path.mkdir()
    torch.save(test_import_torchrec.state_dict(random_reference(), ["t_0", "t_1", "t_2"]), path / "model.pt")
    return path / "model.pt"


def bags(path: Path) -> Path:
    path.mkdir()
    torch.save({"a.weight": torch.ones(5, 4), "bias": torch.ones(3)}, path / "one.pt")
    save_file({"b.weight": torch.ones(5, 4), "n": torch.tensor(3.0)}, path / "two.safetensors")
    np.save(path / "three.npy", np.ones((5, 4), np.float32))
    return path


def sharded(path: Path) -> Path:
    state = {"a.weight": torch.ones(5, 4), "bias": torch.ones(3), "step": 7}
    return test_import_dcp.save(path, state, {"a.weight": test_import_dcp.rectangles(5, 4, [2], [1])})


MAKERS: dict[Peer, Callable[[Path], Path]] = {
    "nvidia_dlrm": lambda path: test_import_nvidia.save(
        path, random_reference(padding=1), test_import_nvidia.metadata([[0, 2, 1]])
    ),
    "facebook_dlrm": facebook,
    "torchrec": torchrec,
    "embedding_bag": bags,
    "dcp": sharded,
}


@cache
def saved(peer: Peer) -> dict[str, bytes]:
    """What a peer's files hold, by name."""
    with tempfile.TemporaryDirectory() as place:
        MAKERS[peer](Path(place) / "peer")
        root = Path(place) / "peer"
        return {str(f.relative_to(root)): f.read_bytes() for f in sorted(root.rglob("*")) if f.is_file()}


def imported(peer: Peer, files: dict[str, bytes]) -> bool:
    """Whether files are imported; a `CheckpointError` otherwise leaves nothing behind."""
    with tempfile.TemporaryDirectory() as place:
        root, target = Path(place) / "peer", Path(place) / "made"
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        source = root / "model.pt" if peer in ("facebook_dlrm", "torchrec") else root
        try:
            import_checkpoint(source, target, peer)
        except CheckpointError as error:
            assert 0 < len(str(error)) < 5000
            assert sorted(p.name for p in Path(place).iterdir()) == ["peer"]
            return False
        return True


@pytest.mark.parametrize("peer", MAKERS)
def test_what_is_not_changed_is_imported(peer: Peer) -> None:
    assert imported(peer, saved(peer))


# -- values of .pt files -------------------------------------------------------------------------------------------

Odd = st.sampled_from(
    [
        *(None, True, -1, 0, 2**31, 2**63, 10**40, 0.5, float("nan"), "", "x", "dot", b"x"),
        *(
            [],
            {},
            (),
            [[]],
            [0],
            [0, 0, 1],
            [[0, "a"]],
            [[0], 1],
            {"shape": 1},
            {0: 1},
            (2**31, 2**31),
            (-1, 4),
            ("a", 2),
        ),
        *(torch.ones(()), torch.ones(0), torch.ones(3), torch.ones(5, 4), torch.ones(2, 2, 2), torch.ones(5, 2000)),
        *(torch.ones(5, 4, dtype=torch.complex64), torch.ones(5, 4, dtype=torch.bool), torch.ones(5, 4).to_sparse()),
        *(WIDE, torch.empty(5, 4, device="meta"), torch.ones(4, 5).T, torch.full((5, 4), float("nan"))),
    ]
)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        yield from nodes(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return to
    value = list(value) if isinstance(value, tuple) else copy.copy(value)
    value[path[0]] = changed(value[path[0]], path[1:], to)
    return value


PT = [(peer, name) for peer in MAKERS for name in saved(peer) if name.endswith(".pt")]


@st.composite
def of_values(draw: st.DrawFn) -> tuple[Peer, str, tuple[Any, ...], Any]:
    peer, name = draw(st.sampled_from(PT))
    return peer, name, draw(st.sampled_from(list(nodes(loaded(peer, name))))), draw(Odd)


@cache
def loaded(peer: Peer, name: str) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        file.write(saved(peer)[name])
        file.flush()
        return torch.load(file.name, weights_only=False)


def with_value(peer: Peer, name: str, path: tuple[Any, ...], value: Any) -> dict[str, bytes]:
    with tempfile.NamedTemporaryFile() as file:
        torch.save(changed(loaded(peer, name), path, value), file.name)
        return {**saved(peer), name: Path(file.name).read_bytes()}


@Fuzz
@given(of_values())
@example(("nvidia_dlrm", "metadata.pt", ("config",), 3))
@example(("nvidia_dlrm", "metadata.pt", ("data", "device_mapping", "embedding", 0), 3))
@example(("nvidia_dlrm", "metadata.pt", ("data", "device_mapping", "embedding", 0), [0, "a", 2]))
@example(("nvidia_dlrm", "embeddings.0.meta.pt", ("shape",), ("a", 2)))
@example(("nvidia_dlrm", "embeddings.0.meta.pt", ("shape",), 3))
@example(("nvidia_dlrm", "top_model.mlp.pt", ("weights",), 3))
@example(("nvidia_dlrm", "top_model.mlp.pt", ("weights", 0), 3))
@example(("nvidia_dlrm", "top_model.out.pt", (), {0: 1}))
@example(("facebook_dlrm", "model.pt", ("state_dict",), {0: 1}))
@example(("facebook_dlrm", "model.pt", ("state_dict", "emb_l.0.weight"), 3))
@example(("facebook_dlrm", "model.pt", ("state_dict", "emb_l.0.weight"), torch.ones(5, 4).to_sparse()))
@example(("torchrec", "model.pt", (), {0: torch.ones(5, 4)}))
@example(("embedding_bag", "one.pt", ("a.weight",), torch.ones(5, 2000)))
@example(("embedding_bag", "one.pt", ("bias",), torch.ones(5, 4, dtype=torch.complex64)))
def test_a_value_is_another(change: tuple[Peer, str, tuple[Any, ...], Any]) -> None:
    peer, name, path, value = change
    imported(peer, with_value(peer, name, path, value))


class Runs:
    """What, unpickled as usual, would run a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_a_command_does_not(tmp_path: Path, zipped: bool, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a.weight": Runs()}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert "Only tensors and plain values are read from .pt files" in refused(tmp_path / "a.pt", "embedding_bag")
    np.save(tmp_path / "b.npy", np.array([Runs()], dtype=object))
    assert "b.npy is not in NumPy's format" in refused(tmp_path / "b.npy", "embedding_bag")
    assert not (tmp_path / "ran").exists()


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.zeros(5_000_000, 4)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "a.pt", "w", 8) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    assert (tmp_path / "a.pt").stat().st_size < 100_000
    assert "is compressed: got " in refused(tmp_path / "a.pt", "embedding_bag")
    with zipfile.ZipFile(tmp_path / "b.npy", "w") as npz:
        npz.writestr("x.npy", "x")
    assert "b.npy is not in NumPy's format" in refused(tmp_path / "b.npy", "embedding_bag")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a.weight": WIDE}, "'a.weight': got 4 bytes, expected 4,000,000,000,000"),
        ({"b": {"c": [WIDE]}}, "'b.c.0': got 4 bytes"),
        ({"a.weight": torch.zeros(7).as_strided((4, 4), (1, 1))}, "got 28 bytes, expected 64 for the shape"),
        ({"a.weight": torch.ones(5, 4).to_sparse()}, "'a.weight': got torch.sparse.FloatTensor"),
        ({"a.weight": torch.empty(5, 4, device="meta")}, "'a.weight': got torch"),
    ],
)
def test_a_tensor_that_is_larger_than_its_file(tmp_path: Path, state: Any, message: str) -> None:
    torch.save(state, tmp_path / "a.pt")
    assert message in refused(tmp_path / "a.pt", "embedding_bag")


def test_many_views_of_the_same_numbers(tmp_path: Path) -> None:
    rows = torch.zeros(5000, 4)
    torch.save({f"t{i}.weight": rows for i in range(3)}, tmp_path / "tied.pt")
    written = import_checkpoint(tmp_path / "tied.pt", tmp_path / "tied", "embedding_bag")
    assert written == read_manifest(tmp_path / "tied")
    torch.save({f"t{i}.weight": rows for i in range(50)}, tmp_path / "a.pt")
    assert "because several are views of the same numbers" in refused(tmp_path / "a.pt", "embedding_bag")


def test_arrays_that_are_longer_than_their_files(tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 16), }"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert "a.npy is not in NumPy's format, or is truncated" in refused(tmp_path / "a.npy", "embedding_bag")
    entry = b'{"a.weight":{"dtype":"F32","shape":[1000000000000,16],"data_offsets":[0,64000000000000]}}'
    (tmp_path / "a.safetensors").write_bytes(len(entry).to_bytes(8, "little") + entry)
    assert "a.safetensors is not a safetensors file" in refused(tmp_path / "a.safetensors", "embedding_bag")


# -- bytes of any file ---------------------------------------------------------------------------------------------


@st.composite
def of_bytes(draw: st.DrawFn) -> tuple[Peer, str, str, int, int]:
    peer = draw(st.sampled_from(list(MAKERS)))
    name = draw(st.sampled_from(list(saved(peer))))
    size = len(saved(peer)[name])
    at = draw(st.one_of(st.integers(0, min(size, 400) - 1), st.integers(0, size - 1)))
    return peer, name, draw(st.sampled_from(["flip", "cut", "insert"])), at, draw(st.integers(0, 255))


@Fuzz
@given(of_bytes())
@example(("embedding_bag", "three.npy", "cut", 0, 0))
@example(("embedding_bag", "two.safetensors", "cut", 9, 0))
def test_bytes_of_a_file_are_others(change: tuple[Peer, str, str, int, int]) -> None:
    peer, name, how, at, byte = change
    data = saved(peer)[name]
    put = {"flip": bytes([byte]) + data[at + 1 :], "cut": b"", "insert": bytes([byte]) + data[at:]}
    imported(peer, {**saved(peer), name: data[:at] + put[how]})
