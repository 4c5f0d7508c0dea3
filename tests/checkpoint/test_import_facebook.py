"""The DLRM of facebookresearch/dlrm comes in with the logits that it had."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hotbed.checkpoint.importers import import_checkpoint
from tests.checkpoint.peers import Reference, assert_close, imported_logits, lower, random_reference, refused


def state_dict(model: Reference) -> dict[str, Tensor]:
    found = {f"emb_l.{i}.weight": table for i, table in enumerate(model.tables)}
    for name, layers in (("bot_l", model.bottom), ("top_l", model.top)):
        for i, (weight, bias) in enumerate(layers):
            found |= {f"{name}.{2 * i}.weight": weight, f"{name}.{2 * i}.bias": bias}
    return found


def test_logits_are_those_of_the_peer(tmp_path: Path) -> None:
    model = random_reference()
    saved = {"epoch": 1, "test_acc": np.float64(0.8), "loss": np.float32(0.5), "state_dict": state_dict(model)}
    torch.save(saved, tmp_path / "dlrm.pt")
    import_checkpoint(tmp_path / "dlrm.pt", tmp_path / "c", "facebook_dlrm", names=["x", "y", "z"])
    assert_close(imported_logits(tmp_path / "c", model, ["x", "y", "z"]), model.logits(lower(model.vectors_of())))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "has no 'state_dict'"),
        ({"emb_l.0.weight_q": torch.zeros(2, 2)}, "got 'emb_l.0.weight_q', expected a DLRM of one process"),
        ({"bot_l.module.0.weight": torch.zeros(2, 2)}, "got 'bot_l.module.0.weight', expected a DLRM of one process"),
        ({"emb_l.1.weight": torch.zeros(2, 2)}, "has no 'emb_l.0.weight'"),
        (
            {k: t for k, t in state_dict(random_reference()).items() if k != "top_l.2.bias"},
            "has no 'top_l.2.bias'",
        ),
        (state_dict(random_reference(padding=4)), "got 26 inputs (as with products of vectors with themselves)"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, state: dict[str, Tensor] | None, message: str) -> None:
    torch.save({"other": 1} if state is None else {"state_dict": state}, tmp_path / "dlrm.pt")
    assert message in refused(tmp_path / "dlrm.pt", "facebook_dlrm")
