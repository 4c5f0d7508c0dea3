"""What is fuzzed: parsers of files that others made, as functions of bytes, with files that are right to begin from.

A target reads its bytes, or ends with one of hotbed's errors; any other is a finding. Those that hypothesis changes
entry by entry have tests beside their package (``tests/*/test_fuzz*.py``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from hotbed.checkpoint import read_manifest, verify_checkpoint
from hotbed.errors import CheckpointError, DataError, PlanError, SpecError
from hotbed.parsing import TextError, parse_yaml
from hotbed.plan import Plan
from tests.checkpoint import test_fuzz as checkpoints
from tests.checkpoint import test_fuzz_importers as importers
from tests.data import test_fuzz as data
from tests.fixtures.make import FOLDER

CORPUS = Path(__file__).parent / "corpus"
"""By target, files that were once found to be read wrongly, or that stand for a kind of attack."""


class Target(NamedTuple):
    """Reads bytes; ``seeds`` makes some that are right, by name."""

    read: Callable[[bytes], object]
    seeds: Callable[[], Mapping[str, bytes]] = dict


def _yaml(content: bytes) -> None:
    with suppress(TextError):
        parse_yaml(content.decode("utf-8", errors="replace"))


def _plan(content: bytes) -> None:
    with suppress(PlanError):
        Plan.from_json(content)


def _description(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        data.described(Path(place))
        (Path(place) / "feature_spec.yaml").write_bytes(content)
        with suppress(DataError, SpecError):
            data.read_dataset(Path(place))


def _a_description() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        return {"right": yaml.safe_dump(data.described(Path(place))).encode()}


def _manifest(content: bytes) -> None:
    with checkpoints.copied("whole") as place:
        folder = Path(place) / "whole"
        (folder / checkpoints.MANIFEST).write_bytes(content)
        with suppress(CheckpointError):
            read_manifest(folder)


def _tensors(content: bytes) -> None:
    with checkpoints.copied("whole") as place:
        folder = Path(place) / "whole"
        (folder / "model.safetensors").write_bytes(content)
        checkpoints.sign_files(folder)
        with suppress(CheckpointError):
            verify_checkpoint(folder)


def _data(name: str) -> Target:
    return Target(lambda content: data.works(name, content), lambda: {"right": data.saved()[name]})


def _import(peer: importers.Peer, name: str) -> Target:
    def read(content: bytes) -> None:
        importers.imported(peer, {**importers.saved(peer), name: content})

    return Target(read, lambda: {"right": importers.saved(peer)[name]})


TARGETS: Mapping[str, Target] = {
    "yaml": Target(
        _yaml, lambda: {"recipe": (FOLDER.parent.parent.parent / "recipes/criteo_kaggle.yaml").read_bytes()}
    ),
    "plan": Target(_plan),
    "description": Target(_description, _a_description),
    "manifest": Target(_manifest, lambda: {"right": (FOLDER / "whole" / checkpoints.MANIFEST).read_bytes()}),
    "safetensors": Target(_tensors, lambda: {"right": (FOLDER / "whole" / "model.safetensors").read_bytes()}),
    "parquet": _data("table.parquet"),
    "csv": _data("table.csv"),
    "criteo": _data("log.tsv"),
    "criteo-gzip": _data("log.tsv.gz"),
    "vocabulary": _data("C1.parquet"),
    "npy": _data("order.npy"),
    "pt": _import("embedding_bag", "one.pt"),
}
