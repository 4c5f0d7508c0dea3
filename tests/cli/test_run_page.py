"""Protects the page of a run: all that was recorded is drawn, nothing else is loaded, and bad runs are refused."""

import builtins
import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hotbed.cli.main import main
from hotbed.cli.pages.report_page import draw_page
from hotbed.cli.pages.run_page import draw_plan, interval, read_runs
from hotbed.data import write_synthetic_log
from hotbed.plan import Plan, Tile
from tests.cli.cases import Output, refused, small_recipe, write_yaml

pytest.importorskip("matplotlib")
SECTIONS = ["Test", "Loss and metrics", "Training", "Time", "Tables", "Plan", "Environment"]


class Page(HTMLParser):
    """Titles, texts, figures and addresses of a page; every element that is opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections, self.texts, self.figures, self.addresses, self.ids = [], [], 0, [], []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "img")
        self.figures += tag == "figure"
        self.addresses += [v for k, v in attrs if k in ("href", "src", "xlink:href") and v]
        self.ids += [v for k, v in attrs if k == "id"]
        if tag != "meta" and tag != "link":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [v for k, v in attrs if k in ("href", "src", "xlink:href") and v]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._open and self._open[-1] == "h2":
            self.sections.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short trainings that differ in their seed alone."""
    root = tmp_path_factory.mktemp("runs")
    write_synthetic_log(root / "log.tsv", 3000, seed=0, test_fraction=0.1)
    assert main(["prepare", str(root / "log.tsv"), str(root / "data")]) == 0
    options = {"steps": 12, "log_every": 2, "eval_every": 6}
    values = small_recipe(root / "data", name="drawn", dim=16, data={"valid_split": "test"}, train=options)
    write_yaml(root / "recipe.yaml", values)
    for seed in ("0", "1"):
        assert main(["train", str(root / "recipe.yaml"), "--out", str(root), "--train.seed", seed]) == 0
    return root / "drawn"


def drawn(path: Path, tmp_path: Path) -> Page:
    file = tmp_path / "report.html"
    assert main(["inspect", str(path), "--html", str(file)]) == 0
    return Page(file.read_text(encoding="utf-8"))


def copied(runs: Path, to: Path) -> Path:
    """One of the runs, to damage."""
    run = to / "run"
    run.mkdir()
    for file in sorted(runs.iterdir())[0].iterdir():
        if file.is_file():
            (run / file.name).write_bytes(file.read_bytes())
    return run


def test_a_page_of_one_run_has_all_sections_figures_and_no_addresses(runs: Path, tmp_path: Path) -> None:
    run = sorted(runs.iterdir())[0]
    page = drawn(run, tmp_path)
    assert page.sections == SECTIONS
    valid = {"auc", "logloss", "normalized_entropy", "calibration"}
    training = ["learning rates", "samples/s", "gradients", "waits", "batches that were ready"]
    assert page.figures == 1 + len(valid) + len(training) + 3  # loss; time, parts of a step and tables
    assert all(address.startswith(("#", "data:,")) for address in page.addresses)
    assert len(set(page.ids)) == len(page.ids)
    text = " ".join(page.texts)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert f"{summary['test']['auc']:.5f}" in text
    assert summary["hardware"] in text
    assert "intervals" not in text
    parts = ("lookups in tables", "backward pass", "update of tables", "medians of 4 logged steps")
    for part in ("norm of the dense part", "26 tables", "norm of a table’s gradients", "one process", *parts):
        assert part in text


def test_what_a_run_records_of_time_tables_and_gradients_is_right(runs: Path) -> None:
    (records,) = read_runs(sorted(runs.iterdir())[0])
    assert records.summary is not None
    time = records.summary["time"]
    rate = (12 - 5) * 128 / (time["steps_s"] + time["waited_s"])
    assert rate == pytest.approx(records.summary["samples_per_s"])
    assert time["first_steps_s"] > 0 < time["paused_s"]
    tables = records.summary["tables"]
    assert len(tables) == 26
    for table in tables:  # 16 float32 and the moment of a row
        assert table["bytes"] == table["rows"] * (16 + 1) * 4
        assert table["ids_per_sample"] == 1
        assert table["grad_norm"] > 0
    norms = records.curves()["grad_norm_dense"]
    assert sorted(norms) == [2, 4, 6, 8, 10, 12]
    assert min(norms.values()) > 0


def test_runs_that_differ_in_their_seed_are_drawn_with_intervals(runs: Path, tmp_path: Path) -> None:
    found = read_runs(runs)
    assert [run.seed for run in found] == [1, 0]
    text = " ".join(drawn(runs, tmp_path).texts)
    assert "means of 2 runs (seeds 1, 0) with 95 % intervals" in text
    auc = interval([run.summary["test"]["auc"] for run in found if run.summary])
    assert f"{auc.mean:.5f} ({auc.low:.5f} to {auc.high:.5f})" in text


def test_intervals_are_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.high - found.mean == pytest.approx(4.303 / math.sqrt(3))
    assert interval([5.0]) == (5, 5, 5)


def test_a_plan_is_a_map_of_tables_ranks_and_tiers() -> None:
    tiles = (
        Tile("users", range(10), range(16), 0, tier="disk"),
        Tile("items", range(0, 10, 2), range(16), 1, readers=(0,)),
        Tile("items", range(1, 10, 2), range(16), 2),
    )
    with draw_page("plan") as page:
        svg, note = draw_plan(page, Plan(3, tiles))
    assert note == "2 tables in 3 tiles on 3 ranks."
    texts = Page(svg).texts
    for part in ("users", "items", "rank", "disk", "device", "copy"):
        assert part in texts
    assert "host" not in texts


def test_each_label_has_a_column_of_its_metrics(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, tmp_path)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    summary["test"]["tasks"] = {"liked & kept": {"samples": 300, "auc": 0.61234, "f1": 0.5}, "shared": {"auc": 0.71234}}
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    texts = drawn(run, tmp_path).texts
    header = texts.index("mean of labels")
    assert texts[header + 1 : header + 3] == ["liked & kept", "shared"]
    row = texts.index("AUC", header)
    assert texts[row + 1 : row + 4] == [f"{summary['test']['auc']:.5f}", "0.61234", "0.71234"]
    assert "0.50000" in texts[texts.index("f1", header) :]


def test_what_a_resumed_run_repeats_counts_once(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, tmp_path)
    again = [{"event": "resume", "step": 4}, {"event": "train", "step": 6, "loss": 7.0}]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in again) + '{"event": "tra')
    (records,) = read_runs(run)
    assert list(records.curves()["loss"]) == [2, 4, 6]
    assert records.curves()["loss"][6] == 7
    assert not records.valid


def test_a_run_that_is_not_finished_is_drawn(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, tmp_path)
    (run / "summary.json").unlink()
    page = drawn(run, tmp_path)
    assert page.sections == SECTIONS
    assert "not finished; recorded up to step 12" in " ".join(page.texts)


def _remove(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove("metrics.jsonl"), "has no metrics.jsonl yet"),
        (_write("metrics.jsonl", ""), "metrics.jsonl has no training records yet"),
        (_write("metrics.jsonl", "{\n"), "metrics.jsonl, line 1 "),
        (_write("metrics.jsonl", "[1]\n"), "line 1 is [1], expected an object"),
        (_write("metrics.jsonl", '{"event": "train", "step": "x"}\n'), "line 1 has step 'x', expected an integer"),
        (_write("recipe.yaml", "[]"), "recipe.yaml is not a recipe"),
        (_write("recipe.yaml", "- {}"), "recipe.yaml is not a recipe"),
        (_write("summary.json", "[]"), "summary.json is not a JSON object"),
        (_write("plan.json", "{}"), "plan.json: "),
    ],
)
def test_a_damaged_run_is_refused_and_nothing_written(
    damage: Callable[[Path], Any], message: str, runs: Path, tmp_path: Path, capsys: Output
) -> None:
    run = copied(runs, tmp_path)
    damage(run)
    file = tmp_path / "report.html"
    assert message in refused(["inspect", str(run), "--html", str(file)], capsys)
    assert not file.exists()


def test_options_that_do_not_go_together_are_refused(runs: Path, tmp_path: Path, capsys: Output) -> None:
    run = sorted(runs.iterdir())[0]
    assert "--label works only for data" in refused(["inspect", str(run), "--label", "x"], capsys)
    assert "which is a directory" in refused(["inspect", str(run), "--html", str(tmp_path)], capsys)
    checkpoint = next((run / "checkpoints").glob("last-*"))
    message = refused(["inspect", str(checkpoint), "--html", str(tmp_path / "x.html")], capsys)
    assert "is a checkpoint" in message


def test_without_matplotlib_the_message_says_what_to_install(
    runs: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    recipe = str(runs.parent / "recipe.yaml")
    for argv in (["inspect", str(runs)], ["inspect", str(runs.parent / "data")], ["plan", recipe]):
        message = refused([*argv, "--html", str(tmp_path / "x.html")], capsys)
        assert "pip install 'hotbed[plot]', or remove --html" in message
