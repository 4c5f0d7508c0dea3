"""Models that are said to be one graph of ``torch.compile`` are, and train to the bits of those not compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.nn.loss import summed_cross_entropy
from hotbed.train.numerics import is_one_graph

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),  # dynamo itself does
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # inductor itself calls it
]
NAMES = ("a", "b", "c")
TABLES = [hb.Table(name, rows=20, dim=8) for name in NAMES]
FEATURES = [
    hb.Feature(name, table=name, pooling=pooling) for name, pooling in zip(NAMES, ("sum", "mean", "sum"), strict=True)
]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "DLRM": lambda: hb.nn.DLRM(TABLES, FEATURES, 3, bottom=(8,), top=(4, 1)),
    "DLRM, dropout": lambda: hb.nn.DLRM(TABLES, FEATURES, 3, bottom=(8,), top=(4, 1), dropout=0.5),
    "DCNv2": lambda: hb.nn.DCNv2(TABLES, FEATURES, 3, top=(4, 1), low_rank=4),
    "DeepFM": lambda: hb.nn.DeepFM(TABLES, FEATURES, 3, top=(4, 1)),
    "MMoE": lambda: hb.nn.MMoE(TABLES, FEATURES, 3, expert=(4,), tower=(4,), tasks=1),
    "WideDeep": lambda: hb.nn.WideDeep(TABLES, FEATURES, 3, top=(4, 1)),
    "TwoTower": lambda: hb.nn.TwoTower(TABLES, FEATURES, 3, item=["c"], widths=(4,)),
}


def trained(name: str, backend: str | None) -> tuple[list[Tensor], int]:
    """Parameters and rows after three batches of unlike sizes, and how many graphs there were."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, draw = MODELS[name](), torch.Generator().manual_seed(2)
    assert is_one_graph(model)
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1), hb.optim.SGD(model, lr=0.1)

    def loss(batch: hb.Batch) -> Tensor:
        return summed_cross_entropy(model(batch), batch.labels, batch.weights_by_label)

    step: Any = loss if backend is None else torch.compile(loss, backend=backend, fullgraph=True)
    for samples in (6, 7, 11):
        ids: dict[str, Any] = {n: torch.randint(0, 20, (samples,), generator=draw) for n in NAMES}
        lengths = torch.randint(0, 4, (samples,), generator=draw)
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
        ids["b"] = torch.randint(0, 20, (int(offsets[-1]),), generator=draw), offsets
        dense, labels = torch.rand(samples, 3, generator=draw), torch.rand(samples, 1, generator=draw)
        step(hb.Batch(sparse=hb.Jagged.from_dict(ids), dense=dense, labels=labels)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    rows = [c.weight(t) for c in model.modules() if isinstance(c, hb.EmbeddingCollection) for t in c.tables]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return [*(p.detach() for p in model.parameters()), *rows], graphs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_model_is_one_graph(name: str, backend: str) -> None:
    if backend == "inductor" and "dropout" in name:
        pytest.skip("inductor draws other random numbers")
    (expected, _), (found, graphs) = trained(name, None), trained(name, backend)
    for one, other in zip(found, expected, strict=True):
        if backend == "inductor":
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)
    assert graphs <= 3  # a size, any size
