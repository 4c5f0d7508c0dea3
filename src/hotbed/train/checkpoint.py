"""Checkpoints: a directory of safetensors files and a manifest that makes them valid.

::

    model.safetensors, dense.safetensors, …   the tensors of one part each
    manifest.json                             written last: format, step, recipe, and per part its plain values; per
                                              file its size and the SHA-256 of every 16 MiB; its own SHA-256

All is written under a hidden name, waits until it is on the disk, and is renamed then, so a directory without a valid
manifest is no checkpoint, and neither a killed run nor a power failure leaves half of one. A part is anything with
``state_dict`` and ``load_state_dict``: a model, an optimizer, a schedule, a loader. Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hotbed.errors import CheckpointError, HotbedError
from hotbed.train import blocks
from hotbed.train.files import sync

FORMAT = 2
MANIFEST = "manifest.json"


class Stateful(Protocol):
    """What a checkpoint can hold."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors and plain values, nested in mappings and sequences."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over what `state_dict` gave."""
        ...


class RandomState:
    """State of torch's default random generators, on all ranks, as a part of a checkpoint.

    Parameters
    ----------
    gather
        Rows of all ranks from those of each, in rank order; default: there is one rank.
    rank
        This one.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor] = lambda rows: rows, rank: int = 0) -> None:
        self._gather, self._rank = gather, rank

    def state_dict(self) -> dict[str, Any]:
        """Generator states by rank ``[W, n]`` uint8; of CUDA that of the present device, or none ``[W, 0]``."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0, dtype=torch.uint8)
        return {"cpu": self._gather(torch.get_rng_state()[None]), "cuda": self._gather(cuda[None])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the generators. Ranks beyond those that were saved take the states in turn."""
        cpu, cuda = state_dict["cpu"], state_dict["cuda"]
        torch.set_rng_state(cpu[self._rank % len(cpu)].clone())  # torch reads a part of a tensor from its start
        if cuda.shape[1] and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda[self._rank % len(cuda)].clone())


def save_checkpoint(
    path: str | Path,
    parts: Mapping[str, Stateful],
    *,
    step: int = 0,
    recipe: Mapping[str, Any] | None = None,
    write: bool = True,
) -> None:
    """Save the state of some parts; of a distributed model, all ranks must call this.

    Parameters
    ----------
    path
        The directory to make.
    parts
        What to save by name, for example ``{"model": model, "sparse": optimizer}``.
    step
        Optimizer steps taken so far.
    recipe
        Plain values of the recipe, so that the model can be built again.

    write
        Whether this rank writes; the others only take part in gathering the state.

    Raises
    ------
    CheckpointError
        If ``path`` exists, or a part's state holds what is neither a tensor nor plain.
    """
    path = Path(path)
    if not write:
        for part in parts.values():
            part.state_dict()
        return
    if path.exists():
        raise CheckpointError(f"{path} exists already; checkpoints are never overwritten, choose another directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.unfinished-{uuid.uuid4().hex[:8]}"
    unfinished.mkdir()
    try:
        states: dict[str, Any] = {}
        files: dict[str, Any] = {}
        for name, part in parts.items():
            tensors: _Tensors = {}
            states[name] = _plain(part.state_dict(), tensors, "")
            if tensors:
                file = unfinished / f"{name}.safetensors"
                save_file({key: t.detach().contiguous() for key, t in tensors.values()}, file)
                sync(file)
                files[file.name] = blocks.describe(file)
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "recipe": recipe, "files": files, "parts": states}
        manifest["sha256"] = _sha256_of(manifest)
        (unfinished / MANIFEST).write_text(_json(manifest), encoding="utf-8")
        sync(unfinished / MANIFEST)
        sync(unfinished)
        unfinished.rename(path)
        sync(path.parent)  # before anybody removes an older checkpoint because there is this one
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_checkpoint(path: str | Path, parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Load the state of some parts; parts of the checkpoint that are not asked for are not read.

    Parameters
    ----------
    path
        A checkpoint's directory.
    parts
        What to load into, by the name it was saved under.

    Returns
    -------
    dict
        The manifest: ``step``, ``recipe``, ….

    Raises
    ------
    CheckpointError
        If the checkpoint is absent, incomplete or damaged, lacks a part, or does not fit it.
    """
    path = Path(path)
    manifest = read_manifest(path)
    for name, part in parts.items():
        if name not in manifest["parts"]:
            raise CheckpointError(f"{path} has no part '{name}'; it has {', '.join(manifest['parts'])}")
        tensors: dict[str, Tensor] = {}
        file = path / f"{name}.safetensors"
        if file.name in manifest["files"]:
            blocks.verify(file, manifest["files"][file.name])
            tensors = load_file(file)
        try:
            part.load_state_dict(_restored(manifest["parts"][name], tensors))
        except (HotbedError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: part '{name}' does not fit this {type(part).__name__}: {error}; load it with the recipe that "
                f"it was made with"
            ) from error
    return manifest


def checkpoints_of(run: Path) -> list[Path]:
    """Checkpoints in a run's ``checkpoints/``, named ``KIND-STEP``, by step; unfinished ones have hidden names."""
    manifests = (run / "checkpoints").glob(f"[!.]*-*/{MANIFEST}")
    return sorted((file.parent for file in manifests), key=lambda path: path.name.split("-")[-1])


def find_checkpoint(path: str | Path) -> Path:
    """The path itself if it is a checkpoint, or a run's newest.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    found = checkpoints_of(path)
    if not found:
        raise CheckpointError(f"{path} is neither a checkpoint ({MANIFEST}) nor a run's directory with one")
    return found[-1]


def verify_checkpoint(path: str | Path) -> None:
    """Read all files of a checkpoint and compare them with the manifest; a `CheckpointError` names what differs."""
    path = Path(path)
    for name, entry in read_manifest(path)["files"].items():
        blocks.verify(path / name, entry)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Manifest of a checkpoint.

    Raises
    ------
    CheckpointError
        If there is none, or it is damaged or of a newer format.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} holds no {MANIFEST}, so it is not a checkpoint, or one that was never finished")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); use another checkpoint") from None
    if version != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {version}, this release reads {FORMAT}; update hotbed")
    if manifest.pop("sha256", None) != _sha256_of(manifest):
        raise CheckpointError(f"{file} is damaged (its content has changed); use another checkpoint")
    return manifest


def _json(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1)


def _sha256_of(manifest: Mapping[str, Any]) -> str:
    """Of a manifest without its own; reading JSON and writing it again leaves it as it was."""
    return hashlib.sha256(_json(manifest).encode()).hexdigest()


# JSON has no tensors, tuples or integer keys, which torch's states use: they are written as {"$kind": …}.


_Tensors = dict[tuple[object, ...], tuple[str, Tensor]]
"""Key and tensor by what the tensor's memory is: tied weights have several places in a state and are saved once."""


def _plain(value: object, tensors: _Tensors, where: str) -> object:
    """Value as JSON; its tensors are put into ``tensors``."""
    if isinstance(value, Tensor):
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        return {"$tensor": tensors.setdefault(memory, (where, value))[0]}
    if isinstance(value, Mapping):
        items = [
            (k, _plain(v, tensors, f"{where}.{k}".lstrip("."))) for k, v in cast("Mapping[Any, Any]", value).items()
        ]
        if all(isinstance(k, str) and not k.startswith("$") for k, _ in items):
            return dict(items)
        if all(isinstance(k, str | int) for k, _ in items):
            return {"$items": [[k, v] for k, v in items]}
    elif isinstance(value, list | tuple):
        plain = [_plain(v, tensors, f"{where}.{i}".lstrip(".")) for i, v in enumerate(cast("list[Any]", value))]
        return {"$tuple": plain} if isinstance(value, tuple) else plain
    elif value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(f"a state holds {type(value).__name__} at '{where}', which a checkpoint cannot hold")


def _restored(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `_plain`."""
    if isinstance(value, list):
        return [_restored(v, tensors) for v in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, Any]", value)
    if "$tensor" in entries:
        return tensors[entries["$tensor"]]
    if "$items" in entries:
        return {k: _restored(v, tensors) for k, v in entries["$items"]}
    if "$tuple" in entries:
        return tuple(_restored(v, tensors) for v in entries["$tuple"])
    return {k: _restored(v, tensors) for k, v in entries.items()}
