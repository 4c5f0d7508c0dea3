"""Protects that the reader of docs/serving scores rows where hotbed is not installed, by itself and in Triton."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from hotbed.cli.main import main
from tests.cli.cases import train
from tests.train.numbers import POSITIVE
from tests.train.numbers import recipe_of_numbers as recipe_of

DOCS = Path(__file__).parents[2] / "docs"
ALONE = """
import json, sys
sys.modules["hotbed"] = None  # as if it were not installed
from reader import Model
model = Model(sys.argv[1])
print(json.dumps(model.scores(json.loads(open(sys.argv[2]).read())).tolist()))
"""
TRITON = """
import json, sys, types
import numpy as np
sys.modules["hotbed"] = None


class Tensor:
    def __init__(self, name, values):
        self.name, self.values = name, values

    def as_numpy(self):
        return self.values


class InferenceResponse:
    def __init__(self, output_tensors, error=None):
        self.output_tensors, self.error = output_tensors, error


utils = types.ModuleType("triton_python_backend_utils")
utils.Tensor, utils.InferenceResponse, utils.TritonError = Tensor, InferenceResponse, str
utils.get_input_tensor_by_name = lambda request, name: next(t for t in request if t.name == name)
sys.modules[utils.__name__] = utils
from model import TritonPythonModel

model = TritonPythonModel()
model.initialize({"model_config": json.dumps({"parameters": {"model": {"string_value": sys.argv[1]}}})})
rows = [json.dumps(row).encode() for row in json.loads(open(sys.argv[2]).read())]
parts = [rows[:7], [b"{}"], rows[7:]]
answers = model.execute([[Tensor("ROWS", np.array(part, dtype=object))] for part in parts])
assert "cannot be scored: KeyError" in answers[1].error, answers[1].error
scores = [a.output_tensors[0] for a in answers if a.error is None]
assert [(s.name, s.values.dtype) for s in scores] == 2 * [("SCORES", np.float64)]
print(json.dumps(np.concatenate([s.values for s in scores]).tolist()))
"""


def recipe_with(folder: Path, **data: Any) -> Path:
    import yaml

    file = recipe_of(folder, [POSITIVE])
    values = yaml.safe_load(file.read_text())
    values["data"].update(data)
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: a model of int8 rows after float32 ones, rows as JSON, ``reader.py``, scores of ``hotbed predict``."""
    folder = tmp_path_factory.mktemp("reader")
    status, _, run = train(recipe_with(folder, dtype="int8", fp32_rows=40), "--train.checkpoint", "last")
    assert status == 0
    rows = pl.read_parquet(folder / "log.parquet")[-60:].drop("rating", "buy")
    rows.write_parquet(folder / "new.parquet")
    assert main(["predict", str(run), str(folder / "new.parquet"), "--out", str(folder / "scores.parquet")]) == 0
    assert main(["export", str(run), str(folder / "model")]) == 0
    samples = [{k: None if v != v else v for k, v in row.items()} for row in rows.to_dicts()]  # JSON has no NaN
    (folder / "rows.json").write_text(json.dumps(samples))
    shutil.copy(DOCS / "serving" / "triton" / "hotbed" / "1" / "reader.py", folder / "reader.py")
    return folder


def scored(folder: Path, code: str) -> None:
    argv = [sys.executable, "-c", code, "model", "rows.json"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = pl.read_parquet(folder / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(np.array(json.loads(done.stdout))[:, 0], expected, rtol=0, atol=1e-6)


def test_the_reader_scores_rows_without_hotbed(exported: Path) -> None:
    scored(exported, ALONE)


def test_the_model_of_triton_s_python_backend_scores_rows(exported: Path) -> None:
    repository = DOCS / "serving" / "triton" / "hotbed"
    shutil.copy(repository / "1" / "model.py", exported / "model.py")
    config = (repository / "config.pbtxt").read_text()
    assert re.findall(r'name: "(\w+)"', config) == ["ROWS", "SCORES"]
    assert 'key: "model"' in config
    scored(exported, TRITON)
