"""The files of docs/jobs that start hotbed on clusters call what is there, and Kubernetes' API takes the manifests."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotbed.cli.main import make_parser

ROOT = Path(__file__).parent.parent
JOBS = ROOT / "docs" / "jobs"
MANIFESTS = sorted(JOBS.glob("kubernetes/*.yaml"))
SCRIPTS = sorted(JOBS.glob("slurm/*.sbatch"))
GIVEN = {"/recipes/recipe.yaml": str(ROOT / "recipes" / "criteo_kaggle.yaml")}
"""Files that are there where the commands run."""


def documents(manifest: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))


def templates(manifest: Path) -> Iterator[dict[str, Any]]:
    for document in documents(manifest):
        if "template" in document["spec"]:
            yield document["spec"]["template"]


def commands_of_hotbed(words: list[str]) -> Iterator[list[str]]:
    """Arguments of each call of hotbed among the words of a command, which may be a shell's."""
    if words[:2] == ["bash", "-c"]:
        words = shlex.split(words[2])
    for i, word in enumerate(words):
        if word == "hotbed":
            yield [GIVEN.get(word, word) for word in words[i + 1 :]]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_commands_of_manifests_are_hotbeds(manifest: Path) -> None:
    found = [
        make_parser().parse_args(arguments).command
        for template in templates(manifest)
        for container in template["spec"]["containers"]
        for arguments in commands_of_hotbed([*container["command"], *container.get("args", [])])
    ]
    assert found == [manifest.stem if manifest.stem == "train" else "prepare"]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_together(manifest: Path) -> None:
    """Selectors find pods, mounts have volumes, and hosts that commands name are services."""
    labels = [template["metadata"]["labels"] for template in templates(manifest)]
    found = [document for document in documents(manifest) if document["kind"] == "Service"]
    services = {
        (service["metadata"]["name"], str(port["port"])) for service in found for port in service["spec"]["ports"]
    }
    for document in documents(manifest):
        selector = document["spec"].get("selector", {})
        selector = selector.get("matchLabels", selector)
        assert not selector or any(selector.items() <= of_pod.items() for of_pod in labels)
    for template in templates(manifest):
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            words = " ".join([*container["command"], *container.get("args", [])])
            assert set(re.findall(r"([a-z-]+):(\d+)\b", words)) <= services


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_follow_the_schemas_of_kubernetes(manifest: Path) -> None:
    """Unknown fields are errors."""
    validator = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    for document in documents(manifest):
        validator.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_of_slurm(script: Path) -> None:
    """Bash reads them, and what they call is hotbed's."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    subprocess.run([bash, "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if "hotbed " in line and not line.startswith("#")]
    kind = "train" if script.stem == "train" else "prepare"
    given = f"{GIVEN['/recipes/recipe.yaml']} --data.path data" if kind == "train" else "logs data --memory 2GiB"
    words = shlex.split(line.replace('"$@"', given).replace("$SLURM_CPUS_PER_TASK", "2"))
    (arguments,) = commands_of_hotbed(words)
    assert make_parser().parse_args(arguments).command == kind


def test_commands_of_the_page_are_hotbeds() -> None:
    """Also those that train with readers on the cluster."""
    page = (ROOT / "docs" / "many_processes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if "hotbed " in line]
    recipe = GIVEN["/recipes/recipe.yaml"]
    words = [shlex.split(line.replace(" recipe.yaml", f" {recipe}"), comments=True) for line in lines]
    found = [make_parser().parse_args(arguments) for of in words for arguments in commands_of_hotbed(of)]
    commands = [each.command for each in found]
    assert commands == ["train", "doctor", "train", "prepare", "train", "prepare", "train", "train"]
    executors = [dict(each.overrides).get("data.executor") for each in found if each.command == "train"]
    assert executors == [None, None, "dask:tcp://HOST:8786", "ray:auto", "ray:auto"]


def test_the_page_names_every_file() -> None:
    page = (ROOT / "docs" / "many_processes.md").read_text(encoding="utf-8")
    for file in (*MANIFESTS, *SCRIPTS):
        assert f"](jobs/{file.relative_to(JOBS).as_posix()})" in page
    assert len(MANIFESTS) == len(SCRIPTS) == 4
    assert all("UNTESTED" in file.read_text(encoding="utf-8") for file in MANIFESTS)
