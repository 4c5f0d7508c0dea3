"""Look up embedding tables: ids in, pooled vectors out, gradients to the sparse optimizer.

In the order of a batch: `collection` (the module) and `tables` (its values and state) → `ids` (checked, laid out as
bags) → `table_group` (the tables of one dim): `local_tables`, or `sharded_tables` with `locate`, `route`,
`model_parallel`, `id_exchange`, and `row_exchange` or `pooled_exchange` → `gradients` (backward to step; `beside`
groups ids before) → `column_sums`, `gather`, `replicas` (what ranks exchange in an update and after it). `arena` has
the rows, `wire` the links, `dynamic` the rows of ids without a vocabulary; `distribute` and `dense` make a distributed
model, `dense_shards` its state under FSDP2; `averages` is SWA and EMA, `plan_names` what plans call the tables of a
model, `traced` lookups inside graphs of ``torch.compile``.
"""

from hotbed.embed import averages as averages  # registers a hook
from hotbed.embed.arena import LocalTile
from hotbed.embed.clip import clip_grad_norm_
from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.distribute import Distributed, distribute, mean_over_ranks
from hotbed.embed.embedding_tables import tables_on_meta
from hotbed.embed.plan_names import collections_of, plan_for, plan_tables

__all__ = [
    "Distributed",
    "EmbeddingCollection",
    "LocalTile",
    "clip_grad_norm_",
    "collections_of",
    "distribute",
    "mean_over_ranks",
    "plan_for",
    "plan_tables",
    "tables_on_meta",
]
