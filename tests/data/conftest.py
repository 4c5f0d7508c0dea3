"""Clusters that tests of several files use; each file has its own, as its tests kill their workers."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_cases import Ray, ask_for_a_token, dask_command_line, ray_command_line
from prepare_cases import GROUP_ROWS, SMALL, dataset, digests

ask_for_a_token()


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The executor of a Dask cluster."""
    pytest.importorskip("distributed", reason="needs hotbed[dask]")
    with dask_command_line(tmp_path_factory.mktemp("dask")) as executor:
        yield executor


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[Ray]:
    """A Ray cluster, as it is reached on its nodes and from elsewhere."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    try:
        with ray_command_line(folder) as found:
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ray(ray_nodes: Ray) -> str:
    """The executor of a Ray cluster."""
    return ray_nodes.executor


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files to prepare, which no test changes."""
    return dataset(tmp_path_factory.mktemp("raw"))


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a preparation have several tasks."""
    monkeypatch.setattr("hotbed.data.preparation.raw_inputs._GROUP_ROWS", GROUP_ROWS)


@pytest.fixture(scope="session")
def expected(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the files that one worker makes of `raw` in small groups."""
    from hotbed.data.preparation.prepare_dataset import prepare

    out = tmp_path_factory.mktemp("expected") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.data.preparation.raw_inputs._GROUP_ROWS", GROUP_ROWS)
        prepare(raw, out, **SMALL, workers=1)
    return digests(out)
