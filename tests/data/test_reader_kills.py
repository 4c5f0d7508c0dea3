"""Readers are killed while a model is trained: it is trained by the same batches, and its losses have the same bits."""

import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from cluster_cases import choose_moments, needs_ray
from reader_cases import PLACES, kill_readers_at
from rich.console import Console

from hotbed.config import Recipe
from hotbed.data import Loader, ParquetSource, open_readers
from hotbed.testing.source_contract import assert_same
from hotbed.train.runs.report import RunDirectory
from hotbed.train.runs.run import train

SEED = 25
WINDOWS = 25
"""In an epoch; there are two."""


def curve(recipe: Path, out: Path, executor: str, workers: int) -> tuple[list[float], dict[str, Any]]:
    """Train two epochs in small windows; the loss of each step, and the test."""
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    source = {"class_path": "hotbed.data.SplitBinarySource", "init_args": {"chunk_samples": 97}}
    values["data"] |= {"executor": executor, "workers": workers, "prefetch": 2, "window": 1, "source": source}
    values["train"] |= {"epochs": 2, "log_every": 1, "checkpoint": "none"}
    values["data"]["valid_split"] = "valid"
    run = RunDirectory(out, "run")
    summary = train(Recipe.from_dict(values), run, Console(file=io.StringIO()))
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"], summary["test"]


def killed(recipe: Path, tmp_path: Path, executor: str, moments: int, workers: int = 2) -> None:
    """Train undisturbed by threads, and by readers that die; all of the moments must have come."""
    expected = curve(recipe, tmp_path / "threads", "threads", 2)
    assert len(expected[0]) > 30
    windows = [f"{epoch}-{window}" for epoch in range(2) for window in range(WINDOWS)]
    choose_moments(tmp_path / "moments", windows, moments, SEED, PLACES)
    with pytest.MonkeyPatch.context() as patch:
        kill_readers_at(patch, tmp_path / "moments")
        assert curve(recipe, tmp_path / "killed", executor, workers) == expected
    assert not list((tmp_path / "moments").iterdir())


@pytest.mark.parametrize(("moments", "workers"), [(1, 1), pytest.param(20, 2, marks=pytest.mark.full)])
def test_processes_that_are_killed(recipe: Path, tmp_path: Path, moments: int, workers: int) -> None:
    killed(recipe, tmp_path, "processes", moments, workers)


@pytest.mark.parametrize(
    ("cluster", "moments"),
    [
        pytest.param("dask", 20, marks=pytest.mark.full),
        pytest.param("ray", 2, marks=needs_ray),
        pytest.param("ray", 20, marks=[pytest.mark.full, needs_ray]),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Dask and Ray
def test_workers_of_clusters_that_are_killed(
    request: pytest.FixtureRequest, recipe: Path, tmp_path: Path, cluster: str, moments: int
) -> None:
    """They were started by separate commands, in other working directories."""
    killed(recipe, tmp_path, request.getfixturevalue(cluster), moments)


class Proxy:
    """Passes on what is sent to an address, and counts its bytes."""

    def __init__(self, host: str, port: int) -> None:
        self.target, self.passed = (host, port), 0
        self.server = socket.create_server((host, 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                self.passed += len(data)
                other.sendall(data)
        except OSError:
            pass
        finally:
            other.close()


@contextmanager
def proxy(executor: str) -> Iterator[tuple[str, Proxy]]:
    """The executor by way of a proxy before Dask's scheduler, or before Ray's GCS, which knows where all is."""
    kind, _, address = executor.partition(":")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    made = Proxy(host, int(port))
    try:
        yield f"{kind}:{address.removesuffix(port)}{made.port}", made
    finally:
        made.server.close()


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["dask", pytest.param("ray", marks=needs_ray)])
@pytest.mark.filterwarnings("ignore")  # of Dask and Ray
def test_batches_do_not_go_through_the_scheduler(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    cluster: str,
    record_property: Callable[[str, object], None],
) -> None:
    """What the trainer and the scheduler say to each other is a small part of what the batches have."""
    ids = np.random.default_rng(0).integers(0, 1000, (4, 200_000))
    table = pa.table({"label": ids[0] % 2} | {f"c{i}": column for i, column in enumerate(ids)})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=25_000)
    source = ParquetSource(tmp_path, {"sparse": [{"name": f"c{i}", "rows": 1000} for i in range(4)]})
    make = partial(Loader, source, "train", 10_000, shuffle=True, window=1)
    with proxy(request.getfixturevalue(cluster)) as (address, counted), open_readers(address) as readers:
        found = list(make(executor=readers))
    for batch, expected in zip(found, make(), strict=True):
        assert_same(batch, expected)
    sent = sum(batch.sparse.values.nbytes for batch in found)
    record_property("bytes_of_ids", sent)
    record_property("bytes_by_the_scheduler", counted.passed)
    assert sent >= 4 * 200_000 * 4
    assert 0 < counted.passed < sent / 10
