import pytest
import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn import DLRM
from hotbed.specs import Feature, Table

from .parity import Weights, assert_parity, mlp, pooled

TABLES = [Table(f"t{i}", rows=10, dim=128) for i in range(26)]
FEATURES = [Feature(f"C{i}", table=f"t{i}") for i in range(26)]


def test_it_has_the_published_shapes():
    model = DLRM(TABLES, FEATURES)
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if name.endswith("weight")}
    assert list(shapes.values()) == [
        *([512, 13], [256, 512], [128, 256]),
        *([1024, 480], [1024, 1024], [512, 1024], [256, 512], [1, 256]),
    ]
    batch = Batch(sparse=Jagged.from_dict({f.name: torch.tensor([1, 2]) for f in FEATURES}), dense=torch.rand(2, 13))
    assert model(batch).shape == (2, 1)


def test_the_last_width_of_top_is_the_number_of_labels():
    model = DLRM(TABLES[:1], FEATURES[:1], 2, bottom=(8, 128), top=(8, 3))
    assert model(Batch(sparse=Jagged.from_dict({"C0": torch.tensor([1])}), dense=torch.rand(1, 2))).shape == (1, 3)


def test_dims_must_fit():
    with pytest.raises(SpecError, match="got 128, expected 16, the last width of bottom"):
        DLRM(TABLES[:1], FEATURES[:1], bottom=(64, 16))


@pytest.mark.parametrize(("dense", "got"), [(None, "0"), (torch.rand(1, 3), "3")])
def test_dense_inputs_must_fit(dense, got):
    model = DLRM(TABLES[:1], FEATURES[:1], 2, bottom=(128,), top=(1,))
    with pytest.raises(BatchError, match=f"dense inputs of the batch: got {got}, expected 2"):
        model(Batch(sparse=Jagged.from_dict({"C0": torch.tensor([1])}), dense=dense))


def test_it_needs_no_dense_inputs():
    model = DLRM(TABLES[:2], FEATURES[:2], 0, bottom=(128,), top=(1,))
    ids = Jagged.from_dict({"C0": torch.tensor([1, 2]), "C1": torch.tensor([1, 3])})
    for dense in (None, torch.empty(2, 0)):
        assert model(Batch(sparse=ids, dense=dense)).shape == (2, 1)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_under_autocast_all_is_computed_in_its_dtype_and_logits_are_float32(dtype):
    seen = []
    tables = [Table(f"t{i}", rows=10, dim=16, dtype=dtype if i else "fp32") for i in range(3)]
    model = DLRM(tables, FEATURES[:3], 2, bottom=(8, 16), top=(8, 1))
    model.interaction.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    batch = Batch(sparse=Jagged.from_dict({f.name: torch.tensor([1, 2]) for f in FEATURES[:3]}), dense=torch.rand(2, 2))
    exact = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(batch)
    assert seen == [torch.float32, torch.bfloat16]
    assert exact.dtype == rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)


def test_what_a_dlrm_cannot_be_made_of():
    tables, pooled = [Table("t", rows=10, dim=4)], [Feature("a", table="t")]
    with pytest.raises(SpecError, match="got no widths, expected at least one, the dim of the tables"):
        DLRM(tables, pooled, bottom=())
    with pytest.raises(SpecError, match="feature 'a': got 'none', expected 'sum'"):
        DLRM(tables, [Feature("a", table="t", pooling="none")], bottom=(4,))


def test_the_top_mlp_may_see_the_embeddings_beside_their_products():
    tables = [Table(f"t{i}", rows=10, dim=16) for i in range(3)]
    model = DLRM(tables, FEATURES[:3], 2, bottom=(8, 16), top=(8, 1), embeddings_to_top=True)
    ids = {f.name: torch.tensor([i + 1, i + 2]) for i, f in enumerate(FEATURES[:3])}
    batch = Batch(sparse=Jagged.from_dict(ids), dense=torch.rand(2, 2))
    vectors = torch.stack([model.bottom(batch.dense), *model.embeddings(batch.sparse).stack().unbind(1)], dim=1)
    beside = torch.cat([model.interaction(vectors), vectors[:, 1:].flatten(1)], dim=1)
    assert model.top[0].in_features == beside.shape[1] == 24 + 3 * 16
    assert torch.equal(model(batch), model.top(beside))


def test_dropout_is_of_training_alone_and_leaves_names_of_parameters():
    made = [
        DLRM([Table("t0", 10, 16)], FEATURES[:1], 2, bottom=(64, 16), top=(64, 1), dropout=share) for share in (0, 0.5)
    ]
    assert made[0].state_dict().keys() == made[1].state_dict().keys()
    batch = Batch(sparse=Jagged.from_dict({"C0": torch.tensor([1, 2])}), dense=torch.rand(2, 2))
    assert torch.equal(made[0](batch), made[0](batch))
    assert not torch.equal(made[1](batch), made[1](batch))
    made[1].eval()
    assert torch.equal(made[1](batch), made[1](batch))


# -- the formula ---------------------------------------------------------------------------------------------------

SMALL = [Table("users", 9, 4), Table("items", 12, 4)]
FIELDS = [Feature("user", "users"), Feature("item", "items"), Feature("bought", "items")]


def batch_of(n: int, dense: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    ids = {
        "user": torch.randint(0, 9, (n,), generator=draw),
        "item": torch.randint(0, 12, (n,), generator=draw),
        "bought": [torch.randint(0, 12, (i % 4,), generator=draw).tolist() for i in range(n)],
    }
    return Batch(sparse=Jagged.from_dict(ids), dense=torch.randn(n, dense, generator=draw) if dense else None)


def plain(weights: Weights, of: Batch, *, beside: bool) -> Tensor:
    """Section 2.2, every pair of vectors by itself; columns that pad the products have weights of no effect."""
    numbers = torch.ones(len(of), 1) if of.dense is None else of.dense
    first = mlp(numbers.double(), weights, "bottom", 2).relu()
    embeddings = [pooled(of, f.name, weights[f"embeddings.{f.table}"]) for f in FIELDS]
    vectors = [first, *embeddings]
    pairs = [(vectors[i] * vectors[j]).sum(1, keepdim=True) for i in range(len(vectors)) for j in range(i)]
    columns = torch.cat([first, *pairs], dim=1)
    padding = columns.new_zeros(len(of), -columns.shape[1] % 8)
    return mlp(torch.cat([columns, padding, *(embeddings if beside else [])], dim=1), weights, "top", 2)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("dense", [0, 3])
def test_logits_and_gradients_are_those_of_the_formula(dense: int, labels: int, beside: bool) -> None:
    model = DLRM(SMALL, FIELDS, dense, bottom=(6, 4), top=(8, labels), embeddings_to_top=beside)
    assert_parity(model, lambda weights, of: plain(weights, of, beside=beside), batch_of(11, dense))
