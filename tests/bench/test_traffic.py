import torch

from hotbed.bench.options import OpsOptions
from hotbed.bench.traffic import Traffic, interaction_bytes
from hotbed.bench.workload import Workload
from hotbed.jagged import Jagged
from hotbed.store import DenseStore, Span

# 3 samples × 2 tables × 2 ids; table t0 names rows 0, 1, 5 and t1 rows 2, 3: 12 ids, 5 distinct rows, 6 bags.
IDS = [0, 1, 1, 1, 5, 0, 2, 2, 2, 3, 3, 2]


def counted(store: DenseStore, **options: object) -> Traffic:
    o = OpsOptions(tables=2, rows=8, dim=4, batch_size=3, pooling=2, **options)
    weights = torch.ones(len(IDS)) if o.weighted else None
    ids = torch.tensor(IDS, dtype=getattr(torch, o.ids))
    workload = Workload(o)
    jagged = Jagged(["t0", "t1"], ids, batch_size=3, fixed=[2, 2], weights=weights)
    bags = workload.layout(jagged)
    assert store.occurrences(bags).slots.tolist() == workload.slots(jagged).tolist()
    return Traffic.of(store.rows, store.moments, bags, store.ops.group(store.occurrences(bags)))


def store(dtype: str = "fp32", fp32_rows: int = 0, moments: tuple[str, ...] = ()) -> DenseStore:
    made = DenseStore([Span(8, fp32_rows)] * 2, 4, dtype=dtype)
    for per in moments:
        made.moments[per] = torch.zeros(16) if per == "row" else torch.zeros(16, 4)
    return made


def test_every_byte_counts_once() -> None:
    traffic = counted(store(moments=("row",)), ids="int32")
    assert (traffic.ids, traffic.distinct, traffic.runs, traffic.bags) == (12, 5, 5, 6)
    assert traffic.lookup == 12 * 4 + 5 * 16 + 6 * 16
    assert traffic.occurrences == 12 * 4 + 12 * 8 + 12 * 8
    assert traffic.group == 12 * 8 + 12 * 8 + 5 * 8 + 5 * 8 + 5 * 8
    index = 12 * 8 + 12 * 8 + 5 * 8 + 5 * 8 + 5 * 8
    assert traffic.update == index + 6 * 16 + 2 * 5 * 16 + 2 * 5 * 4


def test_weights_are_read_and_their_gradient_written() -> None:
    traffic = counted(store(), weighted=True)
    assert traffic.lookup == 12 * (8 + 4) + 5 * 16 + 6 * 16
    assert traffic.occurrences == 12 * (8 + 4) + 12 * (8 + 8 + 4)
    assert traffic.weight_gradient == 12 * 8 + 5 * 16 + 6 * 16 + 12 * 4
    assert traffic.update == counted(store()).update + 12 * 4


def test_a_row_takes_what_it_is_stored_in() -> None:
    assert counted(store("bf16")).row_bytes == 5 * 8
    assert counted(store("int8")).row_bytes == 5 * (4 + 1)  # one scale per row
    assert counted(store("fp8", fp32_rows=3)).row_bytes == 3 * 16 + 2 * 4  # rows 0, 1 of t0 and 2 of t1 are float32


def test_two_moments_per_element() -> None:
    assert counted(store("bf16", moments=("element", "row"))).moment_bytes == 5 * 4 * 4 + 5 * 4


def test_interaction() -> None:
    forward, backward = interaction_bytes(batch_size=2, vectors=3, dim=4, width=8)
    assert forward == 2 * 3 * 4 * 4 + 2 * 8 * 4
    assert backward == 2 * (2 * 3 * 4 * 4) + 2 * 8 * 4
