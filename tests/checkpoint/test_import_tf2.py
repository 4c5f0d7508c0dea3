"""NVIDIA's TensorFlow 2 DLRM comes in with the logits that it had; TensorFlow's own file is read without it."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hotbed.checkpoint.importers import import_checkpoint
from hotbed.checkpoint.importers.tensor_bundle import read_bundle
from hotbed.errors import CheckpointError
from tests.checkpoint.peers import DENSE, Reference, assert_close, imported_logits, lower, pad8, random_reference

NAMES = ["cat_0", "cat_1", "cat_2"]
REAL = Path(__file__).parent / "tensorflow"
"""What TensorFlow 2.21 (tf_keras) writes: values count up from 1000 × the position of the variable."""


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def block(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    out, last = b"", b""
    for key, value in entries:
        shared = next((i for i, (a, b) in enumerate(zip(key, last, strict=False)) if a != b), min(len(key), len(last)))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return out + bytes(4) + (1).to_bytes(4, "little")


def write_bundle(path: Path, tensors: Mapping[str, Tensor], per_block: int = 3) -> None:
    """As TensorFlow does: a sorted table of places, and the bytes."""
    data, entries = b"", [(b"", b"\x08\x01\x1a\x02\x08\x01")]
    for key, tensor in sorted(tensors.items()):
        content = tensor.contiguous().numpy().tobytes()
        dims = b"".join(b"\x12" + varint(len(d)) + d for d in (b"\x08" + varint(size) for size in tensor.shape))
        entry = b"\x08\x01\x12" + varint(len(dims)) + dims + b"\x20" + varint(len(data))
        entries.append((key.encode(), entry + b"\x28" + varint(len(content)) + b"\x35" + bytes(4)))
        data += content
    index, handles = b"", []
    for group in [entries[i : i + per_block] for i in range(0, len(entries), per_block)]:
        body = block(group)
        handles.append((group[-1][0] + b"~", varint(len(index)) + varint(len(body))))
        index += body + bytes(5)
    places = [varint(len(index)) + varint(len(block([])))]
    index += block([]) + bytes(5)
    body = block(handles)
    places.append(varint(len(index)) + varint(len(body)))
    index += body + bytes(5)
    footer = b"".join(places).ljust(40, b"\0") + (0xDB4775248B80FB57).to_bytes(8, "little")
    path.with_name(f"{path.name}.index").write_bytes(index + footer)
    path.with_name(f"{path.name}.data-00000-of-00001").write_bytes(data)


def save(path: Path, model: Reference, **changes: Any) -> Path:
    (path / "sparse").mkdir(parents=True)
    (path / "dense").mkdir()
    for i, table in enumerate(model.tables):
        np.save(path / "sparse" / f"feature_{i}.npy", table.numpy())
    config = {
        "interaction": "dot_custom_cuda",
        "num_numerical_features": DENSE,
        "categorical_cardinalities": [len(table) for table in model.tables],
    }
    (path / "dense" / "config.json").write_text(json.dumps(config | changes))
    tensors: dict[str, Tensor] = {}
    for name, layers in (("bottom_mlp_layers", model.bottom), ("top_mlp", model.top)):
        for i, (weight, bias) in enumerate(layers):
            tensors[f"{name}/{i}/kernel/.ATTRIBUTES/VARIABLE_VALUE"] = weight.T
            tensors[f"{name}/{i}/bias/.ATTRIBUTES/VARIABLE_VALUE"] = bias
    write_bundle(path / "dense" / "dense", tensors)
    return path


def reference() -> Reference:
    return random_reference(inputs=16, padding=pad8(random_reference()))


def test_logits_are_those_of_the_peer(tmp_path: Path) -> None:
    model = reference()
    import_checkpoint(save(tmp_path / "peer", model), tmp_path / "c", "tf2")
    ours = model._replace(bottom=[(model.bottom[0][0][:, :DENSE], model.bottom[0][1]), *model.bottom[1:]])
    expected = model.logits(lower(model.vectors_of(), pad8(model)))
    assert_close(imported_logits(tmp_path / "c", ours, NAMES), expected)


def test_what_tensorflow_wrote_is_read() -> None:
    tensors = read_bundle(REAL / "dense")
    shapes = [
        ("bottom_mlp_layers", 0, (16, 24)),
        ("bottom_mlp_layers", 1, (24, 16)),
        ("top_mlp", 0, (24, 32)),
        ("top_mlp", 1, (32, 1)),
    ]
    assert len(tensors) == 8
    for number, (name, layer, shape) in enumerate(shapes):
        for kind, size in (("kernel", shape), ("bias", shape[1:])):
            expected = torch.arange(float(np.prod(size))).view(size) + 1000 * (2 * number + (kind == "bias"))
            assert torch.equal(tensors[f"{name}/{layer}/{kind}/.ATTRIBUTES/VARIABLE_VALUE"], expected)


def test_every_cut_or_changed_index_is_read_or_refused(tmp_path: Path) -> None:
    for file in REAL.iterdir():
        shutil.copy(file, tmp_path)
    index = (REAL / "dense.index").read_bytes()
    for at in range(len(index)):
        for changed in (index[:at] + bytes([index[at] ^ 255]) + index[at + 1 :], index[:at] + index[at + 1 :]):
            (tmp_path / "dense.index").write_bytes(changed)
            try:
                read_bundle(tmp_path / "dense")
            except CheckpointError as error:
                assert "copy it again" in str(error)


def change_config(**changes: Any) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        file = path / "dense" / "config.json"
        config = {k: v for k, v in (json.loads(file.read_text()) | changes).items() if v is not None}
        file.write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "dense" / "config.json").unlink(), "config.json is missing; copy the whole checkpoint"),
        (lambda p: (p / "dense" / "config.json").write_text("{"), "config.json is not JSON"),
        (change_config(interaction=None), "config.json has no 'interaction'; is this NVIDIA's TensorFlow 2 DLRM?"),
        (change_config(interaction="cross"), "interaction is 'cross', hotbed's DLRM has the dot interaction only"),
        (change_config(num_numerical_features=7), "takes 16 inputs, but config.json says 7 numerical features, padded"),
        (change_config(num_numerical_features=17), "takes 16 inputs, but config.json says 17 numerical features"),
        (change_config(categorical_cardinalities=[34, 5, 9]), "feature_0.npy has 20 rows, but dense/config.json says"),
        (lambda p: (p / "sparse" / "feature_1.npy").unlink(), "feature_1.npy is missing; copy the whole checkpoint"),
        (lambda p: (p / "dense" / "dense.index").unlink(), "dense.index is missing"),
        (lambda p: (p / "dense" / "dense.index").write_bytes(b"x"), "dense.index is no index of a TensorFlow check"),
        (
            lambda p: (p / "dense" / "dense.data-00000-of-00001").write_bytes(b"x"),
            "cannot be read as a TensorFlow checkpoint: its tensors take 7,524 bytes, the file has 1",
        ),
        (lambda p: write_bundle(p / "dense" / "dense", {"x": torch.zeros(1)}), "has no 'bottom_mlp_layers/0/kernel'"),
        (
            lambda p: write_bundle(
                p / "dense" / "dense", {"bottom_mlp_layers/0/kernel/.ATTRIBUTES/VARIABLE_VALUE": torch.zeros(1, 1)}
            ),
            "has no 'bottom_mlp_layers/0/bias'; copy the whole checkpoint",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    change(save(tmp_path / "peer", reference()))
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path / "peer", tmp_path / "c", "tf2")
    assert message in str(caught.value)
    assert not (tmp_path / "c").exists()
