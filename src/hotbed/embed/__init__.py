"""Look up embedding tables: ids in, pooled vectors out, gradients to the sparse optimizer.

The files in the order of a batch:

1. `collection` is the module. `embedding_tables` has its values and state.
2. `ids` checks ids and makes bag layouts. `dynamic` assigns rows to ids of tables without a vocabulary.
3. `table_group` is the contract of the tables of one dim. `local_tables` implements it for one rank, and
   `sharded_tables` for several. `single_lookup` is the fast path for modules with one feature, and
   `shared_arenas` lets their tables share memory.
4. `shard_routing` finds the owners of rows with `tile_layers`, and `node_routing` combines requests inside nodes.
   `row_exchange` and `pooled_exchange` exchange rows or pooled vectors.
5. `lookup_gradients` keeps gradients from backward until the step. `side_stream` groups ids during the forward pass.
6. `column_sums`, `gather` and `replicas` exchange sums, updated rows and averages in the update.

`arena` stores the rows. `distribute` and `dense_parallel` make a distributed model, and `plan_names` names its tables
in plans. `compile_ops` traces lookups in graphs of ``torch.compile``, `averages` implements SWA and EMA, `clip` clips
gradients, and `idle_tables` detects tables without an optimizer.
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
