"""List the ways to train that are counted."""

from tests.census.steps import Case

RULES = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "LAMB", "PartialRowWiseAdam", "FTRL")

CASES = {
    "usual": (
        Case(),
        Case(optimizer="Adam", dtype="int8", fp32_rows=8, moving=True),
        Case(ragged=True),
        Case(precision="fp32"),
        Case(dense_fused=False),
        Case(where="uva"),
        Case(where="records"),
        Case(where="cache"),
    ),
    "more": (
        Case(ragged=True, pooling="mean"),
        Case(ragged=True, weighted=True),
        Case(precision="tf32"),
        Case(precision="fp16"),
        Case(where="records", hot_rows=20),
        Case(where="records", hot_rows=20, batches="split"),
        Case(where="records", hot_rows=20, batches="turns"),
        Case(where="uva", hot_rows=20),
        Case(ragged=True, history=True),
    ),
    "rules": tuple(
        Case(optimizer=rule, dtype=dtype, moving=True, ragged=ragged)
        for rule in RULES
        for dtype in ("fp32", "bf16")
        for ragged in (False, True)
    ),
    "dtypes": tuple(
        Case(dtype=dtype, fp32_rows=rows, ragged=ragged)
        for dtype in ("bf16", "fp16", "int8", "fp8")
        for rows in (0, 8)
        for ragged in (False, True)
    ),
    "captured": (
        Case(moving=True, ragged=True),
        Case(optimizer="Adam", dtype="int8", fp32_rows=8, moving=True, ragged=True),
    ),
    "captured, other models": (Case(recompute=True, ragged=True), Case(history=True, ragged=True)),
    "replay": (Case(),),
    "faults": (Case(moving=True, ragged=True),),
    "two ranks": (
        Case(ranks=2),
        Case(ranks=2, ragged=True, optimizer="Adam", moving=True),
        Case(ranks=2, ragged=True, weighted=True, reader="first"),
    ),
    "more ranks": (
        Case(ranks=2, cut="row"),
        Case(ranks=2, cut="row", ragged=True, pooling="mean", weighted=True),
        Case(ranks=2, cut="row", optimizer="Adam", dtype="int8", fp32_rows=8),
        Case(ranks=2, cut="row", hot_rows=20),
        Case(ranks=2, cut="row", hot_rows=20, batches="turns"),
        Case(ranks=2, where="uva"),
        Case(ranks=2, where="cache"),
    ),
    "records over ranks": (
        Case(ranks=2, where="records"),
        Case(ranks=2, where="records", cut="row"),
        Case(ranks=2, where="records", cut="row", optimizer="Adam", dtype="int8", fp32_rows=8, moving=True),
        Case(ranks=2, where="records", hot_rows=20),
        Case(ranks=2, where="records", hot_rows=20, batches="split"),
        Case(ranks=2, where="records", hot_rows=20, batches="split", cut="row"),
    ),
    "replicas and columns": (
        Case(ranks=2, replicas=2),
        Case(ranks=2, replicas=2, optimizer="Adam", dtype="int8", fp32_rows=8, moving=True),
        Case(ranks=2, cut="column"),
    ),
    "hops": (Case(ranks=4, hops=(2, 2)),),
    "nodes": (
        Case(ranks=4),
        Case(ranks=4, node=2),
        Case(ranks=4, cut="row", hot_rows=20),
        Case(ranks=4, node=2, cut="row", hot_rows=20),
    ),
    "pooled vectors": (
        Case(ranks=2, ragged=True),
        Case(ranks=2, ragged=True, pooled=1),
        Case(ranks=2, ragged=True, pooled=4),
    ),
}
