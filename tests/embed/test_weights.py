"""Per-id weights scale rows, and their gradients are those of plain PyTorch."""

import pytest
import torch
from torch.nn.functional import embedding_bag

from hotbed import ops
from hotbed.embed import EmbeddingCollection
from hotbed.errors import OptimizerError
from hotbed.jagged import Jagged
from hotbed.optim import SGD
from hotbed.specs import Feature, Table

BAGS = [[3, 1, 3], [], [0], [9, 3]]
IDS = torch.tensor([3, 1, 3, 0, 9, 3])
SAMPLE = torch.tensor([0, 0, 0, 2, 3, 3])
LENGTHS = torch.tensor([3, 0, 1, 2])
OFFSETS = torch.tensor([0, 3, 3, 4])
NARROW = ["fp32", "bf16", "fp16", "int8", "fp8"]


def make(pooling: str = "sum", dtype: str = "fp32", backend: str = "auto", **options) -> EmbeddingCollection:
    table = Table("t", rows=10, dim=20, dtype=dtype, fp32_rows=2)
    return EmbeddingCollection([table], [Feature("h", table="t", pooling=pooling, **options)], backend=backend)


def weights(n: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def upstream(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("training", [True, False])
def test_sums_as_embedding_bag(training, dtype, backend):
    collection, w = make("sum", dtype, backend).train(training), weights()
    plain = weights()
    expected = embedding_bag(IDS, collection.weight("t"), OFFSETS, mode="sum", per_sample_weights=plain)
    out = collection(Jagged.from_dict({"h": BAGS}, {"h": w}))["h"]
    torch.testing.assert_close(out, expected)
    ops.launches.clear()
    out.backward(upstream(4, 20))
    assert ops.launches[f"{'cpu' if backend == 'auto' else backend}.weight_gradient"] == 1
    expected.backward(upstream(4, 20))
    torch.testing.assert_close(w.grad, plain.grad)


def test_rows_get_their_weighted_gradients_beside():
    collection, w = make(), weights()
    optimizer = SGD(collection, lr=1.0)
    table, plain = collection.weight("t").clone().requires_grad_(), weights()
    collection(Jagged.from_dict({"h": BAGS}, {"h": w}))["h"].square().sum().backward()
    optimizer.step()
    embedding_bag(IDS, table, OFFSETS, mode="sum", per_sample_weights=plain).square().sum().backward()
    torch.testing.assert_close(w.grad, plain.grad)
    torch.testing.assert_close(collection.weight("t"), table.detach() - table.grad)


@pytest.mark.parametrize("stopped", ["eval", "freeze"])
def test_weights_learn_while_tables_do_not(stopped):
    collection, w = make(), weights()
    getattr(collection, stopped)()
    optimizer = SGD(collection, lr=1.0)
    before = collection.weight("t").clone()
    collection(Jagged.from_dict({"h": BAGS}, {"h": w}))["h"].sum().backward()
    optimizer.step()
    torch.testing.assert_close(w.grad, before.sum(1)[IDS])
    assert torch.equal(collection.weight("t"), before)


def test_fixed_weights_cost_no_gradient():
    collection = make()
    out = collection(Jagged.from_dict({"h": BAGS}, {"h": weights().detach()}))["h"]
    ops.launches.clear()
    out.sum().backward()
    assert not ops.launches["cpu.weight_gradient"]
    assert not make().eval()(Jagged.from_dict({"h": BAGS}, {"h": weights().detach()}))["h"].requires_grad


@pytest.mark.parametrize("training", [True, False])
def test_parts_of_several_dims_and_dtypes_add_up(training):
    tables = [Table("a", 10, 20), Table("b", 10, 20, dtype="int8"), Table("c", 10, 3), Table("d", 10, 20, dtype="fp8")]
    features = [
        Feature("fa", table="a"),
        Feature("fb", table="b", pooling="mean"),
        Feature("fc", table="c"),
        Feature("fd", table="d", pooling="none"),
    ]
    collection = EmbeddingCollection(tables, features).train(training)
    w = {f.name: weights(seed=i) for i, f in enumerate(features)}
    e = collection(Jagged.from_dict(dict.fromkeys(w, BAGS), w))
    out = {name: e[name].values() if name == "fd" else e[name] for name in w}
    sum((v * upstream(*v.shape)).sum() for v in out.values()).backward()
    for feature in features:
        rows, g = collection.weight(feature.table)[IDS], upstream(*out[feature.name].shape)
        each = (rows * (g if feature.pooling == "none" else g[SAMPLE])).sum(1)
        expected = each / LENGTHS[SAMPLE] if feature.pooling == "mean" else each
        torch.testing.assert_close(w[feature.name].grad, expected)


def test_a_feature_outside_the_loss_gives_its_weights_zero():
    tables, features = [Table("a", 10, 4), Table("c", 10, 3)], [Feature("fa", table="a"), Feature("fc", table="c")]
    collection = EmbeddingCollection(tables, features)
    w = {"fa": weights(), "fc": weights(seed=1)}
    collection(Jagged.from_dict(dict.fromkeys(w, BAGS), w))["fa"].sum().backward()
    torch.testing.assert_close(w["fa"].grad, collection.weight("a").sum(1)[IDS])
    assert torch.equal(w["fc"].grad, torch.zeros(6))


def test_dropped_and_truncated_ids_give_their_weights_zero():
    collection, w = make(on_bad_id="drop", max_len=2, on_too_long="truncate"), weights()
    wild = [[30, 1, 3], [], [0], [9, -1]]
    collection(Jagged.from_dict({"h": wild}, {"h": w}))["h"].sum().backward()
    rows = collection.weight("t").sum(1)
    zero = torch.zeros(())
    torch.testing.assert_close(w.grad, torch.stack([zero, rows[1], zero, rows[0], rows[9], zero]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_come_in_the_dtype_of_the_weights(dtype):
    collection, w = make(), weights(dtype=dtype)
    collection(Jagged.from_dict({"h": BAGS}, {"h": w}))["h"].backward(upstream(4, 20))
    assert w.grad.dtype == dtype
    expected = (collection.weight("t")[IDS] * upstream(4, 20)[SAMPLE]).sum(1)
    torch.testing.assert_close(w.grad, expected.to(dtype))


def test_rows_get_the_weights_of_the_lookup_although_these_are_stepped_first():
    collection, w = make(), torch.nn.Parameter(torch.ones(6))
    sparse, dense = SGD(collection, lr=1.0), torch.optim.SGD([w], lr=1.0)
    before = collection.weight("t").clone()
    batch = Jagged(["h"], IDS, batch_size=6, weights=w)
    collection(batch)["h"].sum().backward()
    dense.step()
    sparse.step()
    torch.testing.assert_close((before - collection.weight("t"))[:, 0], torch.bincount(IDS, minlength=10).float())


@pytest.mark.parametrize("what", ["values", "offsets", "weights"])
def test_batches_that_change_before_the_step_are_refused(what):
    collection = make()
    optimizer = SGD(collection, lr=1.0)
    before = collection.weight("t").clone()
    batch = Jagged.from_dict({"h": (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))}, {"h": torch.ones(3)})
    collection(batch)["h"].sum().backward()
    getattr(batch, what).view(-1)[1].sub_(1)
    with pytest.raises(OptimizerError, match="ids, offsets or per-id weights were changed in place"):
        optimizer.step()
    assert torch.equal(collection.weight("t"), before)


def test_a_step_between_lookup_and_backward_is_refused():
    collection, w = make(), weights()
    optimizer = SGD(collection, lr=1.0)
    late = collection(Jagged.from_dict({"h": BAGS}, {"h": w}))["h"].sum()
    collection(Jagged.from_dict({"h": BAGS}))["h"].sum().backward()
    optimizer.step()
    with pytest.raises(OptimizerError, match="rows were updated between a lookup and its backward"):
        late.backward()
    assert w.grad is None
