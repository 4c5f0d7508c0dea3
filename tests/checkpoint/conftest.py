"""Directories of each kind, for tests of what must hold in any."""

import uuid
from pathlib import Path

import pytest

from hotbed.checkpoint import Directory, directory


@pytest.fixture(params=["local", "file", "s3", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    """An empty directory of each kind."""
    name = uuid.uuid4().hex
    paths = {"local": str(tmp_path / name), "file": f"file://{tmp_path / name}", "memory": f"memory://{name}"}
    if request.param == "s3":
        return directory(request.getfixturevalue("s3").replace("PATH", name))
    return directory(paths[request.param])
