"""The README's example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_trains():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["loss"].item() > 0
    assert names["sparse"].state_dict()["state"][0]["sum_of_squares"].nonzero().flatten().tolist() == [7, 8]


def test_the_readme_has_six_commands_that_exist():
    from hotbed.cli.main import COMMANDS

    blocks = re.findall(r"^```bash\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    commands = set(re.findall(r"^hotbed ([\w-]+)", "\n".join(blocks), re.MULTILINE))
    assert commands == {"init", "train", "predict", "plan", "serve", "doctor"}
    assert commands <= COMMANDS.keys()
