"""Protects: recorded checkpoints load, go on to the same bits, and are written as the same bytes.

The checkpoints in ``tests/fixtures`` were made once. A hash that differs here means that users' checkpoints would be
read or trained otherwise; no hash is recorded anew without a new format and a way to read the old one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hotbed as hb
from hotbed.checkpoint import load_checkpoint, read_manifest, verify_checkpoint
from hotbed.checkpoint.manifest import FORMAT
from hotbed.cli.main import main
from tests.checkpoint.test_checkpoint import Part
from tests.fixtures.make import FOLDER, RANKS, RUN, make, make_difference, make_tiles
from tests.fixtures.models import CASES, STEPS, build, embeddings, sha256, state, train
from tests.ranks import Ranks

LOADED = {
    "whole": "3390389fa65ea2c5fa68bfff05923ea5c0e006e1a43a3c591921fe3b7ab75746",
    "tiles": "3b53bd2e207df5bbd4773d5786c24bf361f3d3a34de01b60749677f698f15730",
    "narrow": "5bed53f5324e306fd3537b6be519dae3135c036368a845e647df59ddc1f8bb72",
    "lazy": "27f73c8ba36b786e471caab6866866a2dcb3d00690c033068b7e3e8e15c945f8",
    "dynamic": "d7bdc940cde478d2d7d53238dbfad109e21a5eff156ea5d28b9be6521b9ab19c",
    "adam": "ab3a80d8c31093c9fb0c0e3a57a2642f8390d83d03c4c0d113681622034ada5e",
    "compact": "e4a677060e52b6f6d235f6cde3799ed99a63fffcb054072dca6499e7b20cd5f4",
    "sgd": "47f5521e71e25174b3ee042fd04592d585973745f96b661b08e115beb53e0b90",
    "momentum": "2c15556e31d9468b5ddb7e4a0eb40e89e8ad81c935a4b3f66f2b8f86158ff42b",
    "adagrad": "a62f95ebdeb27515f3eac38995fb959415bbce84b22631e7405792ac1ca45e40",
    "adamw": "30e96237fade9404ba1c613200b3ea6064b6db6257f534c690bf573435cba99b",
    "partial_rowwise_adam": "04bcc5af3556f8cb68c974a6fe845307f8bb46a5cb9af69b27630322593a9335",
    "lamb": "4d8ec34f484c3edde7bae51f3ec8d3a7aa3d09d0c2dec74fedeabe9d07f60537",
    "ftrl": "dfe719236d5851890a1829315d6b5dccbd0d0f8a8e2ab9e67191278ac019a104",
}
"""SHA-256 of rows, moments and step counts of each checkpoint."""

TRAINED = {
    "whole": "a6b9fc39d761fc7995b1596f276575b6b65320d77732b874f23c16799419679b",
    "tiles": "04f1acd82a9211b756b159425e517b4af4bb2550621bdccf92ece60d1d631af4",
    "narrow": "d1f92cf051564ed8ae469eb4f60b18bede8a308f25a15b37c17441612b8c4f99",
    "lazy": "34dadfe0cd25d386011e57be8a77a66b8baf84c2b95cef12295dae0588657a3b",
    "dynamic": "201b46fd74866cc9c2eda1877e9e3f6f75d137116b763106379c14dd5cf1afed",
    "adam": "e7e25ca8118d09f2748c3c4324beaabfc82a01f3d79dbe3ed9ee659572961f98",
    "compact": "162801fef5d81fe26ec8fe8eb92063c29d25feab4419e717ca6924fb376f760b",
    "sgd": "4413de4e7e79bc52f15a02174978be23aa1c7d7f02ef3043cf6a5d7c144c7998",
    "momentum": "0cb848318bf0779ce8795275bd6349a93d5f75bfb918276a15c1b7c52c690bac",
    "adagrad": "dd2c4c85a2a591ab8d761b9a6a3708a95f86b3e550bc69bd3f1260ea628bf3da",
    "adamw": "bde24820c83986922128606610744762bb132191fc097d844983cd80783c308b",
    "partial_rowwise_adam": "9c8fce70b08db6bb85a5b1afc0d173dffba5f9ed7502dc369a8ce78273fef436",
    "lamb": "fba9b9953513659d40183c4111bca925961a2ec03a15503073f67e2fdf51a5bf",
    "ftrl": "339f46a66e4b1746565be510de78fe8388589ff9419db0676dd8a7d93fd95e0e",
}
"""SHA-256 of the same two steps later, with what these looked up."""

PARTS = {
    "model": "4c7b57a349e7a559d20354878f060f7747dbf7f7ee82ad23929b5244aa624f84",
    "dense": "ceb3808eaa925f610a358fb5870f8bceb07522ed08be6143719e9305f38c631b",
    "sparse": "1c01fe4b3973f0515a074969e18a31c1a9ebb091c1fcff572bda5fac897d7198",
    "dense_schedule": "47d21bdeb9ddb7910061b81295a406ada4ff59b9456557235717d922b11ca3cf",
    "sparse_schedule": "f38e9c4def7ee2d30f210e9d6f0b959e0e16af968c67c41acb6ccf9ac2c9dc69",
    "random": "a78aca486dde70ea901f3bfbb864a4a5541a2584f2b4ae678c080e5abbc3e826",
    "position": "4266f15e1afd301756581287cef4bcb10cdb77ebba5c67aa7161390aa5d5e36c",
    "ids": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
}
"""SHA-256 of the states that the run's checkpoint has beside its tables."""


def hashes(name: str, plan: Any = None, group: dist.ProcessGroup | None = None) -> tuple[str, str]:
    """Load a checkpoint into a new model, and train this; hashes of both."""
    case = CASES[name]
    parts = build(case, group=group, plan=plan)
    manifest = load_checkpoint(FOLDER / name, parts)
    assert (manifest.step, manifest.recipe) == (STEPS, {"name": name})
    loaded = sha256(state(parts))
    looked_up = train(case, parts, range(100, 102))
    return loaded, sha256([state(parts), looked_up])


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_checkpoint_loads_and_goes_on_to_the_recorded_bits(name: str) -> None:
    assert verify_checkpoint(FOLDER / name) == read_manifest(FOLDER / name)
    assert hashes(name) == (LOADED[name], TRAINED[name])


def test_rows_in_tiers_load_and_go_on_to_the_same_bits() -> None:
    for name in ("lazy", "whole", "adam", "compact"):
        plan = CASES[name].plan or hb.Cut(tier="disk", cache_rows=7)
        assert hashes(name, plan) == (LOADED[name], TRAINED[name]), name


@pytest.mark.parametrize("name", [name for name in CASES if name != "tiles"])
def test_a_checkpoint_made_today_has_the_recorded_bytes(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    assert files(tmp_path / name) == files(FOLDER / name)


def test_the_order_of_rows_in_tiers_does_not_depend_on_what_was_read_meanwhile(tmp_path: Path) -> None:
    case = CASES["lazy"]
    parts = build(case, plan=case.plan)
    train(case, parts, range(STEPS))
    hb.save_checkpoint(tmp_path / "before", parts, step=STEPS)
    disk, popular = (embeddings(parts).local_tiles(name)[-1].arena.store for name in ("disk", "popular"))
    assert disk.nbytes < popular.nbytes
    disk.prefetch(torch.arange(disk.slots))
    assert disk.nbytes > popular.nbytes
    hb.save_checkpoint(tmp_path / "after", parts, step=STEPS)
    assert files(tmp_path / "after") == files(tmp_path / "before")


def test_a_recorded_difference_loads_on_its_base_to_the_bits_of_a_whole_checkpoint() -> None:
    manifest = verify_checkpoint(FOLDER / "difference")
    assert manifest.base is not None
    assert (manifest.base.name, read_manifest(FOLDER / "difference_base").step) == ("difference_base", STEPS - 1)
    parts = build(CASES["whole"])
    assert load_checkpoint(FOLDER / "difference", parts).step == STEPS
    assert sha256(state(parts)) == LOADED["whole"]
    looked_up = train(CASES["whole"], parts, range(100, 102))
    assert sha256([state(parts), looked_up]) == TRAINED["whole"]


def test_a_difference_made_today_has_the_recorded_bytes(tmp_path: Path) -> None:
    make_difference(tmp_path)
    for name in ("difference_base", "difference"):
        assert files(tmp_path / name) == files(FOLDER / name), name


def test_every_checkpoint_was_recorded_in_the_format_that_is_read() -> None:
    files = {file.parent.name: json.loads(file.read_text("utf-8")) for file in FOLDER.glob("*/manifest.json")}
    assert files.keys() == {*CASES, "difference_base", "difference"}
    assert {values["format"] for values in files.values()} == {FORMAT} == {1}


def test_ranks_write_the_recorded_bytes_and_any_plan_loads_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(RANKS, make_tiles, tmp_path)
    assert files(tmp_path / "tiles") == files(FOLDER / "tiles")
    for plan in ("row", hb.Cut(rows=0, tier="disk")):
        assert {loaded for loaded, _ in ranks.run(RANKS, on_a_rank, "tiles", plan)} == {LOADED["tiles"]}, plan


def on_a_rank(group: dist.ProcessGroup, name: str, plan: Any) -> tuple[str, str]:
    return hashes(name, plan, group)


# -- a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the recorded run; the current one has its recipe and data."""
    with tarfile.open(FOLDER / RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    (found,) = Path("out/small").iterdir()
    return found


def plain(value: Any) -> Any:
    """A state with hashes in the place of tensors."""
    if isinstance(value, Tensor):
        return sha256(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def test_all_states_of_a_recorded_run_are_read(run: Path) -> None:
    place = run / "checkpoints" / "last-00000005"
    manifest = verify_checkpoint(place)
    kept = {name: Part() for name in manifest.parts}
    load_checkpoint(place, kept)
    found = {name: json.dumps(plain(part.state)).encode() for name, part in kept.items()}
    assert {name: hashlib.sha256(text).hexdigest() for name, text in found.items()} == PARTS


def test_a_recorded_run_goes_on_to_its_end(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("out", "again")
    ends: list[Any] = []
    for out, resume in (("out", "auto"), ("again", f"again/small/{run.name}/checkpoints/last-00000005")):
        command = ["train", "small.yaml", "--out", out, "--resume", resume, "--json", "summary.json"]
        assert main([*command, "--train.epochs", "2", "--train.steps", "9"]) == 0
        assert "last-00000005 at step 5" in capsys.readouterr().err
        summary = json.loads(Path("summary.json").read_text())
        assert (summary["steps"], Path(summary["run"]) == run) == (9, resume == "auto")
        ends.append(verify_checkpoint(Path(summary["run"]) / "checkpoints" / "last-00000009"))
    one, other = ({name.replace(f"-{end.attempt}", ""): of for name, of in end.files.items()} for end in ends)
    assert one == other
    assert [end.step for end in ends] == [9, 9]


def test_a_recorded_run_is_evaluated_as_it_was(run: Path) -> None:
    before = json.loads((run / "summary.json").read_text())
    assert main(["eval", "--checkpoint", str(run), "--json", "eval.json"]) == 0
    found = json.loads(Path("eval.json").read_text())
    assert (before["steps"], Path(found["checkpoint"]).name) == (5, "last-00000005")
    metrics = before["test"]
    assert {key: found["test"][key] for key in metrics} == pytest.approx(metrics, rel=1e-4)
