"""Tables narrower than float32 train as float32 ones, within the rounding of their dtype."""

import copy
import io

import pytest
import torch

from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.ops.rows import random_bits, round_stochastic, step_seeds
from hotbed.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from hotbed.specs import Feature, Table

NARROW = ["bf16", "fp16", "int8", "fp8"]
DTYPES = ["fp32", *NARROW]
ROWS, DIM = 12, 20
OPTIMIZERS = {
    "sgd": lambda c: SGD(c, lr=0.01, momentum=0.9),
    "rowwise_adagrad": lambda c: RowWiseAdagrad(c, lr=0.05),
    "adam": lambda c: Adam(c, lr=0.01),
}


def make(tables: dict[str, str], *, fp32_rows: int = 0, rows: int = ROWS, **options) -> EmbeddingCollection:
    """Tables by name and dtype, and a feature of the same name for each."""
    return EmbeddingCollection(
        [Table(name, rows, DIM, init_bound=0.5, dtype=d, fp32_rows=fp32_rows) for name, d in tables.items()],
        [Feature(name, table=name) for name in tables],
        **options,
    )


def batch(names, step: int, size: int = 6) -> Jagged:
    """Bags of 3 ids per feature; those of a feature do not depend on which others there are."""
    ids = {}
    for name in names:
        draw = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
        ids[name] = torch.randint(0, ROWS, (size, 3), generator=draw)
    return Jagged.from_dict(ids)


def train(collection: EmbeddingCollection, optimizer, steps) -> list[float]:
    """Pull every vector towards 1, feature by feature."""
    losses = []
    for step in steps:
        e = collection(batch([f.name for f in collection.features], step))
        loss = sum((e[f.name] - 1).square().sum() for f in collection.features)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits(collection: EmbeddingCollection) -> dict[str, bytes]:
    return {key: t.view(torch.uint8).numpy().tobytes() for key, t in collection.state_dict().items()}


ALL = {f"t_{dtype}": dtype for dtype in DTYPES}


# -- lookups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("fp32_rows", [0, 4])
def test_tables_of_one_dim_stack_in_the_order_of_features(fp32_rows, backend):
    names = ["t_int8", "t_fp32", "t_fp8", "t_int8", "t_bf16", "t_fp16"]
    features = [Feature(f"f{i}", table=name) for i, name in enumerate(names)]
    tables = [Table(n, ROWS, DIM, dtype=d, fp32_rows=fp32_rows) for n, d in ALL.items()]
    collection = EmbeddingCollection(tables, features, backend=backend)
    ids = torch.arange(2 * len(names)).view(-1, 2)
    e = collection(Jagged.from_dict({f.name: ids[i] for i, f in enumerate(features)}))
    assert e.stack().shape == (2, 6, DIM)
    for i, name in enumerate(names):
        assert torch.equal(e.stack()[:, i], collection.weight(name)[ids[i]])
        assert torch.equal(e[f"f{i}"], e.stack()[:, i])


def test_weight_shares_the_memory_of_float32_tables_and_copies_narrow_ones():
    collection = make(ALL)
    before = bits(collection)
    for name, dtype in ALL.items():
        rows = collection.weight(name)
        assert rows.dtype == torch.float32 and rows.shape == (ROWS, DIM)
        rows.fill_(2.0)
        assert (collection.weight(name) == 2).all() == (dtype == "fp32")
    assert {key for key, value in bits(collection).items() if value != before[key]} == {"t_fp32.weight"}
    shared = make({"t": "int8"}, fp32_rows=ROWS).weight("t").fill_(2.0)
    assert shared.dtype == torch.float32


# -- training ------------------------------------------------------------------------------------------------------


def test_rows_are_rounded_with_the_random_bits_of_their_table_step_row_and_column():
    """Fixed for good: a run that goes on after an upgrade has the bits that it would have had."""
    table = Table("t", ROWS, DIM, init_bound=0.5, dtype="bf16", init_seed=7)
    collection, rows = EmbeddingCollection([table], [Feature("t", table="t")]), torch.tensor([3, 8])
    optimizer = SGD(collection, lr=0.01)
    for step in (1, 2, 3):
        new = collection.weight("t")[rows] - torch.tensor(0.01)
        random = random_bits(step_seeds(torch.tensor(7), torch.tensor(step)), rows, torch.arange(DIM))
        collection(Jagged.from_dict({"t": rows}))["t"].sum().backward()
        optimizer.step()
        rounded = round_stochastic(new, torch.bfloat16, torch.empty(0, dtype=torch.int8), random)
        assert torch.equal(collection.weight("t")[rows], rounded.float())


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_table_with_float32_rows_only_is_a_float32_table(optimizer, dtype):
    a, b = make({"t": dtype}, fp32_rows=ROWS), make({"t": "fp32"})
    assert bits(a) == bits(b)
    assert train(a, optimizer(a), range(5)) == train(b, optimizer(b), range(5))
    assert bits(a) == bits(b)


@pytest.mark.parametrize("dtype", NARROW)
def test_float32_rows_of_a_narrow_table_train_as_in_a_float32_table(dtype):
    a, b = make({"t": dtype}, fp32_rows=5), make({"t": "fp32"})
    for collection in (a, b):
        optimizer = Adam(collection, lr=0.01)
        for step in range(5):
            e = collection(batch("t", step))
            (e["t"] * torch.linspace(-1, 1, DIM)).sum().backward()  # a gradient that does not depend on rows
            optimizer.step()
    assert torch.equal(a.weight("t")[:5], b.weight("t")[:5])
    assert not torch.equal(a.weight("t")[5:], b.weight("t")[5:])


# -- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_run_repeats_itself_to_the_bit_on_every_backend(optimizer):
    runs = []
    for backend in ("auto", "auto", "reference"):
        collection = make(ALL, fp32_rows=3, backend=backend)
        runs.append((train(collection, optimizer(collection), range(3)), bits(collection)))
    assert runs[0] == runs[1]
    assert runs[0][1] == runs[2][1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(optimizer):
    whole = make(ALL, fp32_rows=3)
    expected = train(whole, optimizer(whole), range(6))
    first = make(ALL, fp32_rows=3)
    stopped = optimizer(first)
    train(first, stopped, range(3))
    saved = copy.deepcopy((first.state_dict(), stopped.state_dict()))
    second = make(ALL, fp32_rows=3, seed=0)
    other = optimizer(second)
    train(second, other, range(7, 9))
    second.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert train(second, other, range(3, 6)) == expected[3:]
    assert bits(second) == bits(whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_other_tables_change_no_bit_of_a_table(optimizer, dtype):
    def of_t(tables):
        collection = make(tables, fp32_rows=3)
        train(collection, optimizer(collection), range(4))
        return {key: value for key, value in bits(collection).items() if key.startswith("t.")}

    alone = of_t({"t": dtype})
    assert of_t({"t": dtype, "u": dtype}) == alone
    assert of_t({"u": dtype, "v": "fp32", "t": dtype}) == alone


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_count_alike_whatever_shares_the_arena(dtype):
    def of_t(names):
        tables = [Table(name, ROWS, DIM, dtype=dtype) for name in names]
        collection = EmbeddingCollection(tables, [Feature(name, table=name, pooling="none") for name in names])
        optimizer = Adam(collection, lr=0.01)
        for step, used in enumerate("tut"):  # the second step has gradients of the other table only
            if used in names:
                collection(batch(names, step))[used].values().square().sum().backward()
            optimizer.step()
        return int(optimizer.state_dict()["state"][0]["step"]), collection.weight("t")

    alone, beside = of_t("t"), of_t("tu")
    assert alone[0] == beside[0]
    assert torch.equal(alone[1], beside[1])


# -- state and copies ----------------------------------------------------------------------------------------------


def test_state_dict_has_what_tables_are_stored_as():
    state = make(ALL, fp32_rows=2).state_dict()
    assert {key: (t.dtype, tuple(t.shape)) for key, t in state.items()} == {
        "t_fp32.weight": (torch.float32, (ROWS, DIM)),
        "t_bf16.weight": (torch.bfloat16, (ROWS - 2, DIM)),
        "t_bf16.fp32_weight": (torch.float32, (2, DIM)),
        "t_fp16.weight": (torch.float16, (ROWS - 2, DIM)),
        "t_fp16.fp32_weight": (torch.float32, (2, DIM)),
        "t_int8.weight": (torch.int8, (ROWS - 2, DIM)),
        "t_int8.exponents": (torch.int8, (ROWS - 2, 1)),
        "t_int8.fp32_weight": (torch.float32, (2, DIM)),
        "t_fp8.weight": (torch.float8_e4m3fn, (ROWS - 2, DIM)),
        "t_fp8.fp32_weight": (torch.float32, (2, DIM)),
    }
    assert list(make({"t": "int8"}).state_dict()) == ["t.weight", "t.exponents"]
    assert list(make({"t": "int8"}, fp32_rows=ROWS).state_dict()) == ["t.weight"]


def test_state_of_another_dtype_or_with_other_float32_rows_is_refused():
    collection = make({"t": "int8"}, fp32_rows=2)
    with pytest.raises(RuntimeError, match=r"got bfloat16 \[10, 20\] in the state_dict, expected int8 \[10, 20\]"):
        collection.load_state_dict(make({"t": "bf16"}, fp32_rows=2).state_dict() | {"t.exponents": torch.zeros(10, 1)})
    with pytest.raises(RuntimeError, match=r"got int8 \[9, 20\] in the state_dict, expected int8 \[10, 20\]"):
        collection.load_state_dict(make({"t": "int8"}, fp32_rows=3).state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "t.fp32_weight"'):
        collection.load_state_dict(make({"t": "int8"}, rows=10).state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "t.exponents"'):
        make({"t": "fp32"}).load_state_dict(collection.state_dict() | {"t.weight": torch.zeros(ROWS, DIM)})


def through_a_file(collection):
    file = io.BytesIO()
    torch.save(collection, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file], ids=["deepcopy", "pickle"])
def test_copies_are_independent(copied):
    collection = make(ALL, fp32_rows=3)
    optimizer = Adagrad(collection, lr=0.05)
    train(collection, optimizer, range(2))
    other = copied(collection)
    assert bits(other) == bits(collection)
    before = bits(other)
    train(collection, optimizer, range(2, 4))
    assert bits(other) == before
    after = bits(collection)
    losses = train(other, Adagrad(other, lr=0.05), range(20))
    assert bits(collection) == after
    assert losses[-1] < losses[0] and all(bits(other)[key] != before[key] for key in before if "exponents" not in key)
