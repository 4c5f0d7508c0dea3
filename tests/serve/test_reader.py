"""Protects that the reader of docs/serving scores rows where hotbed is not installed, by itself and in Triton."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml

from hotbed.cli.main import main
from tests.cli.cases import train
from tests.train.numbers import POSITIVE
from tests.train.numbers import recipe_of_numbers as recipe_of

REPOSITORY = Path(__file__).parents[2] / "docs" / "serving" / "triton" / "hotbed"
CODE = """
import json, sys, types
import numpy as np
sys.modules["hotbed"] = None  # as if it were not installed
from reader import Model

rows = json.loads(open(sys.argv[2]).read())
alone = Model(sys.argv[1]).scores(rows).tolist()


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
texts = [json.dumps(row).encode() for row in rows]
parts = [texts[:7], [b"{}"], texts[7:]]
answers = model.execute([[Tensor("ROWS", np.array(part, dtype=object))] for part in parts])
assert "cannot be scored: KeyError" in answers[1].error, answers[1].error
scores = [a.output_tensors[0] for a in answers if a.error is None]
assert [(s.name, s.values.dtype) for s in scores] == 2 * [("SCORES", np.float64)]
print(json.dumps([alone, np.concatenate([s.values for s in scores]).tolist()]))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: a model of int8 rows after float32 ones, rows as JSON, code of docs, scores of ``hotbed predict``."""
    folder = tmp_path_factory.mktemp("reader")
    recipe = recipe_of(folder, [POSITIVE])
    values = yaml.safe_load(recipe.read_text())
    values["data"] |= {"dtype": "int8", "fp32_rows": 40}
    recipe.write_text(yaml.safe_dump(values))
    status, _, run = train(recipe, "--train.checkpoint", "last", "--train.steps", "3")
    assert status == 0
    rows = pl.read_parquet(folder / "log.parquet")[-60:].drop("rating", "buy")
    rows.write_parquet(folder / "new.parquet")
    assert main(["predict", str(run), str(folder / "new.parquet"), "--out", str(folder / "scores.parquet")]) == 0
    assert main(["export", str(run), str(folder / "model")]) == 0
    samples = [{k: None if v != v else v for k, v in row.items()} for row in rows.to_dicts()]  # JSON has no NaN
    (folder / "rows.json").write_text(json.dumps(samples))
    for name in ("reader.py", "model.py"):
        shutil.copy(REPOSITORY / "1" / name, folder / name)
    return folder


def test_the_reader_and_the_model_of_triton_score_rows_without_hotbed(exported: Path) -> None:
    config = (REPOSITORY / "config.pbtxt").read_text()
    assert re.findall(r'name: "(\w+)"', config) == ["ROWS", "SCORES"]
    assert 'key: "model"' in config
    argv = [sys.executable, "-c", CODE, "model", "rows.json"]
    done = subprocess.run(argv, cwd=exported, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = pl.read_parquet(exported / "scores.parquet")["score"].to_numpy()
    for scores in json.loads(done.stdout):
        np.testing.assert_allclose(np.array(scores)[:, 0], expected, rtol=0, atol=1e-6)
