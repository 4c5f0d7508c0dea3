"""Protects that a mistake on the command line or in a recipe gets one message with the fix, and makes nothing."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hotbed.cli.main import main
from tests.cli.cases import Output

HUGE = 10**30
RECIPE: dict[str, Any] = {
    "name": "x",
    "data": {
        "source": {"class_path": "hotbed.data.ZipfSource", "init_args": {"train_samples": 320, "test_samples": 64}},
        "path": "rows.yaml",
        "dim": 16,
    },
    "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16], "top": [8, 1]}},
    "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
    "sparse_optimizer": {"class_path": "hotbed.optim.SGD", "init_args": {"lr": 0.05}},
    "train": {"batch_size": 64, "device": "cpu"},
}
TEXT = yaml.safe_dump(RECIPE, sort_keys=False)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
)


def short(value: object) -> str:
    """What a test is called for."""
    return repr(value)[:30]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.yaml").write_text("rows: [300, 40]\ndense: 3\n")
    (tmp_path / "r.yaml").write_text(TEXT)
    (tmp_path / "folder").mkdir()
    return tmp_path


def refused_with(argv: list[str], message: str, folder: Path, capsys: Output) -> None:
    before = sorted(folder.rglob("*"))
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("hotbed: error: ")
    assert message in said
    assert "Traceback" not in said
    assert len(said) < 4000
    assert sorted(folder.rglob("*")) == before


# -- recipes that are none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the recipe: got None, expected a mapping"),
        ("- 1\n- 2\n", "the recipe: got [1, 2], expected a mapping"),
        ("hello", "the recipe: got 'hello', expected a mapping"),
        ("name: é\n".encode("latin-1"), "is not YAML: 'utf-8' codec can't decode byte 0xe9"),
        (TEXT.encode("utf-16"), "is not YAML"),
        (b"\0\0\0", "is not YAML"),
        (BOMB, "got 490,329,064, expected at most 262,144"),
        ("a: 0x" + "f" * 9999, "number: got 10,001 characters, expected at most 400"),
        ("[" * 5000, "is nested more than 100 deep"),
        ("{a: " * 3000, "is nested more than 100 deep"),
        (TEXT + "name: y\n", "the key 'name' is repeated"),
        (TEXT.replace("dim: 16", "dim: 16\n  dim: 32"), "the key 'dim' is repeated"),
        ("a:\n\t- b", "is not YAML"),
        ("!!python/object/apply:os.system ['touch made']", "is not YAML: could not determine a constructor"),
        (TEXT + "schedule: &s\n  warmup_steps: *s\n", "is infinite: an alias is inside of the value"),
        ("&a\nname: x\ndata: *a\n", "is infinite: an alias is inside of the value"),
        (TEXT + "1: 2\n", "the recipe has an unknown key '1'"),
        (TEXT + "~: 2\n", "the recipe has an unknown key 'None'"),
        (TEXT + "? [1, 2]\n: 2\n", "is not YAML"),
        (TEXT + "---\n" + TEXT, "is not YAML: expected a single document"),
        ("#" * (17 << 20), "is longer than 16,777,216 bytes, so it is not a recipe"),
    ],
    ids=short,
)
def test_files_that_are_no_recipe(content: str | bytes, message: str, folder: Path, capsys: Output) -> None:
    (folder / "bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused_with(["train", "bad.yaml"], message, folder, capsys)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/dev/zero", "/dev/zero is longer than 16,777,216 bytes"),
        ("/dev/null", "the recipe: got None"),
        ("folder", "got the directory folder, expected a file"),
        ("", "got the directory ., expected a file"),
        ("absent.yaml", "there is no recipe absent.yaml"),
        ("a\0b", "is not YAML: embedded null byte"),
        ("x" * 300, "name too long"),
    ],
    ids=short,
)
def test_names_of_no_recipe(name: str, message: str, folder: Path, capsys: Output) -> None:
    refused_with(["train", name], message, folder, capsys)


def test_a_recipe_that_may_not_be_read(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "r.yaml")

    monkeypatch.setattr("hotbed.files.read_text", denied)  # root, as in containers, may read everything
    refused_with(["train", "r.yaml"], "Permission denied: 'r.yaml'", folder, capsys)


# -- values that cannot be -----------------------------------------------------------------------------------------

OPTIMIZER, TABLES, MODEL, SOURCE = (
    f"{key}.class_path" for key in ("dense_optimizer", "sparse_optimizer", "model", "data.source")
)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(("name", name, "expected a plain directory name") for name in ("..", ".", "a/b", "a\nb", "a\\b", "", "  ")),
        *(("name", name, "expected a plain directory name") for name in ("a\0b", "\x1b[31m", "x" * 300, "\ud800")),
        ("train.seed", 2**64, "train.seed: got 18,446,744,073,709,551,616, expected below 2**64"),
        ("train.seed", -1, "train.seed: got -1, expected at least 0"),
        ("train.seed", "9" * 5000, "train.seed"),
        (OPTIMIZER, "torch.optim.LBFGS", "torch.optim.LBFGS needs a closure that computes the loss again"),
        (OPTIMIZER, "torch.optim.SparseAdam", "needs sparse gradients"),
        (OPTIMIZER, "torch.Size", "dense_optimizer is torch.Size, expected a torch.optim.Optimizer"),
        (OPTIMIZER, "torch.optim.Adan", "module 'torch.optim' has no class 'Adan'; did you mean 'Adam'?"),
        (OPTIMIZER, "torch.optimm.Adam", "did you mean 'optim'?"),
        (OPTIMIZER, "hotbed.optim.SGD", "hotbed.optim.SGD trains tables"),
        (OPTIMIZER, "Adam", "expected an import path like torch.optim.Adam"),
        (OPTIMIZER, "torch..Adam", "expected an import path like torch.optim.Adam"),
        (TABLES, "torch.optim.Adam", "sparse_optimizer"),
        (TABLES, "hotbed.optim.RowwiseAdagrad", "did you mean 'RowWiseAdagrad'?"),
        (TABLES, "hotbed.optim.SparseOptimizer", "is a base class"),
        (MODEL, "os.system", "model.class_path: got 'os.system', expected a class of hotbed"),
        (MODEL, "hotbed.__main__.x", "class_path: got 'hotbed.__main__.x', expected"),
        (MODEL, "torch.Size", "model is torch.Size, expected a torch.nn.Module"),
        (MODEL, "hotbed.nn.DLMR", "did you mean 'DLRM'?"),
        (SOURCE, "torch.Size", "data.source is torch.Size, expected a hotbed.data.Source"),
        (SOURCE, "hotbed.data.ZipfSorce", "did you mean 'ZipfSource'?"),
        *(
            ("dense_optimizer.init_args.lr", lr, "expected a finite float32")
            for lr in (".nan", ".inf", "nan", "1e400", "1e39")
        ),
        *(("sparse_optimizer.init_args.lr", lr, "SGD: lr: got") for lr in (".nan", ".inf", -1, "x", "[1]", "null")),
        *(("schedule.decay_power", power, "finite number above 0; 1 is linear") for power in (".nan", ".inf", -1, 0)),
        *(("train.checkpoint_minutes", minutes, "a finite number above 0") for minutes in (".nan", ".inf", -1, 0)),
        ("train.batch_size", -5, "train.batch_size: got -5, expected at least 1"),
        ("train.batch_size", 1.5, "train.batch_size: got 1.5, expected an integer"),
        *((key, HUGE, "000,000, expected below 2**64") for key in ("train.batch_size", "train.steps", "data.dim")),
        ("data.dim", 0, "data.dim: got 0, expected at least 1"),
        ("data.dim", "{C9: 4}", "dim"),
        (
            "parallel.timeout_s",
            10**12,
            "parallel.timeout_s: got 1,000,000,000,000, expected at least 1 and at most 31,536,000 (a year)",
        ),
        ("data.source.init_args.train_samples", 0, "train_samples: got 0, expected at least 1"),
        ("data.source.init_args.train_samples", 1.5, "train_samples: got 1.5, expected an integer"),
        ("data.source.init_args.train_samples", 10**20, "expected at least 1 and at most 1,099,511,627,776"),
        ("model.init_args.bottom", "[]", "DLRM: bottom: got no widths"),
        ("model.init_args.bottom", "{a: 1}", "hotbed.nn.DLRM rejected init_args"),
        ("model.init_args.bottom", "[10000000000000, 16]", "error"),
        ("model.init_args.top", "[8, 0]", "widths [8, 0], expected positive inputs"),
        ("model.init_args.x.y", 1, "hotbed.nn.DLRM: init_args: got 'x'"),
        ("data.path", "absent", "'absent' is neither a file nor one of"),
        ("data.path", "/dev/zero", "/dev/zero is longer than"),
        ("data.test_split", "nope", "data.test_split: got 'nope', expected one of train, test"),
        ("train", 5, "train: got 5, expected a mapping"),
        ("data", "x", "'x' is neither a file nor one of"),  # short for data.path
        ("model.init_args", "x", "model.init_args: got 'x', expected a mapping"),
        ("memory.tier", "ram", "memory.tier: got 'ram', expected one of device, host, disk"),
    ],
    ids=short,
)
def test_values_that_cannot_be(key: str, value: object, message: str, folder: Path, capsys: Output) -> None:
    refused_with(["train", "r.yaml", f"--{key}={value}"], message, folder, capsys)


# -- other arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train"], "no recipe: got neither a file nor options"),
        (["train", "r.yaml", "r.yaml"], "unknown argument r.yaml"),
        (["train", "r.yaml", "--json", "folder"], "--json: got 'folder', which is a directory"),
        (["train", "r.yaml", "--json", ""], "--json: got '', which is a directory"),
        (["train", "r.yaml", "--json", "rows.yaml/x.json"], "is not writable"),
        (["train", "r.yaml", "--json", "/proc/nope/x.json"], "/proc is not writable"),
        (["eval", "r.yaml", "--checkpoint", "x", "--json", "folder"], "unknown argument r.yaml"),
        (["inspect", "rows.yaml", "--json", "folder"], "--json: got 'folder', which is a directory"),
        (["train", "r.yaml", "--resume", "absent"], "absent is not a checkpoint"),
        (["train", "r.yaml", "--init_from", "absent"], "absent is not a checkpoint"),
        (["train", "r.yaml", "--out", "rows.yaml"], "rows.yaml"),
        (["inspect", "/dev/zero"], "/dev/zero"),
        (["init", "/dev/zero"], "/dev/zero"),
        (["init", "folder"], "folder"),
        (["init", "r.yaml"], "r.yaml"),
        (["prepare", "/dev/null", "out"], "/dev/null"),
        (["prepare", "absent", "out", "--memory", "much"], "--memory: got 'much', expected a number of bytes"),
        (["prepare", "absent", "out", "--schema", "rows.yaml"], "rows.yaml has no schema"),
        (["prepare", "absent", "out", "--schema", "absent.yaml"], "there is no recipe absent.yaml"),
        (["demo", "/dev/null", "--out", "demo"], "/dev/null is neither a file nor a directory"),
        (["demo", "--seed", "-1", "--out", "demo"], "--seed: got -1, expected at least 0"),
        (
            ["demo", "--seed", str(2**64), "--out", "demo"],
            "--seed: got 18,446,744,073,709,551,616, expected below 2**64",
        ),
        (["demo", "--samples", "5", "--out", "demo"], "--samples: got 5, expected at least 100"),
        (["checkpoint", "verify", "/dev/zero"], "/dev/zero"),
        (["checkpoint", "inspect", "folder"], "folder"),
    ],
)
def test_arguments_that_cannot_be(argv: list[str], message: str, folder: Path, capsys: Output) -> None:
    refused_with(argv, message, folder, capsys)


def test_what_is_no_mistake_runs(folder: Path, capsys: Output) -> None:
    """Anchors and merge keys are YAML's, and a name may be of any script."""
    text = TEXT.replace("name: x", "name: &n été").replace("dim: 16", "<<: {dim: 16}")
    (folder / "good.yaml").write_text(text, encoding="utf-8")
    assert main(["train", "good.yaml", "--train.steps", "1", "--json", "new/summary.json"]) == 0, (
        capsys.readouterr().err
    )
    assert (folder / "runs" / "été").is_dir()
    assert (folder / "new" / "summary.json").is_file()
