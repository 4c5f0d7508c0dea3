"""What must be set before any test module is imported, and what tests of many packages share."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Several test processes share the cores; OpenMP's idle threads would spin against them. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

if TYPE_CHECKING:
    from .ranks import Ranks  # imports hotbed.train, which the process that only distributes tests does not need

if not torch.cuda.is_available():
    # Read when triton is first imported: without a GPU its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    pass  # the GPU suite runs tests that draw no examples where there is none; all others fail
else:
    from .matrix import MORE_EXAMPLES

    # Times differ tenfold between machines and with cold caches; no test depends on them.
    settings.register_profile("quick", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("full", settings.get_profile("quick"), max_examples=MORE_EXAMPLES)  # make test-all
    settings.load_profile("quick")


LONG = {
    line for line in (Path(__file__).parent / "full.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"
}
"""Tests that are marked `full` because they take long, not because they are a cell of a matrix."""


FAILED: list[str] = []
"""Tests that failed in this session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="run part K of N parts, e.g. 2/6; files are assigned by their hash")
    parser.addoption("--failed", type=Path, help="write the names of failed tests to this file, one per line")


def note_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Add a failed test, or a file that cannot be collected, to `FAILED`."""
    if report.failed and report.nodeid not in FAILED:
        FAILED.append(report.nodeid)


pytest_runtest_logreport = pytest_collectreport = note_failure


def pytest_sessionfinish(session: pytest.Session) -> None:
    path: Path | None = session.config.getoption("--failed")
    if path is not None and not hasattr(session.config, "workerinput"):  # one process of pytest has all reports
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name}\n" for name in FAILED), encoding="utf-8")


def deselect_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a part such as ``2/6``, to which files are assigned by their hash."""
    part = str(config.getoption("--part"))
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    number, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= parts:
        raise pytest.UsageError(f"--part: got {part}, expected K/N with K from 1 to N, e.g. 2/6")
    of_parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        of_parts[zlib.crc32(item.nodeid.partition("::")[0].encode()) % parts == number - 1].append(item)
    items[:] = of_parts[True]
    config.hook.pytest_deselected(items=of_parts[False])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark long tests, and keep the tests of a part. If all tests are collected, each long test must exist."""
    for item in items:
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.full)
    gone = LONG - {item.nodeid for item in items}
    if gone and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        raise pytest.UsageError(f"tests/full.txt lists tests that are not there: {', '.join(sorted(gone))}")
    deselect_other_parts(config, items)


@pytest.fixture(scope="session", autouse=True)
def _tables(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what CSV files are converted to with the tests' files, also in processes that tests start."""
    os.environ["HOTBED_TABLES"] = str(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes joined by Gloo, a pool for each of pytest's workers."""
    from .ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """URI of a bucket of a server on this machine, with PATH where the rest of a path goes."""
    server_module = pytest.importorskip("moto.server")
    import boto3

    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    before = {name: os.environ.get(name) for name in keys}
    os.environ.update(keys)
    boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="models")
    yield f"s3://models/PATH?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    server.stop()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(name="log", scope="session")
def _log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hotbed.data import write_synthetic_log

    path = tmp_path_factory.mktemp("log") / "log.tsv"
    write_synthetic_log(path, 3000, seed=1)
    return path


@pytest.fixture(name="prepared", scope="session")
def _prepared(log: Path) -> Path:
    from hotbed.cli.main import main

    out = log.parent / "prepared"
    argv = ["prepare", str(log), str(out), "--threshold", "5", "--valid_fraction", "0.1", "--json", str(out) + ".json"]
    assert main(argv) == 0
    return out


@pytest.fixture(name="recipe")
def _recipe(tmp_path: Path, prepared: Path) -> Path:
    import yaml

    file = tmp_path / "small.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "small",
                "data": {"path": str(prepared), "dim": 8},
                "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}},
                "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
                "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
                "train": {"batch_size": 128, "device": "cpu"},
            }
        )
    )
    return file
