"""Train models: the loop, its callbacks, metrics and reports.

`trainer` is the loop and `step` is one step. `checkpoints` saves, and `directory_lock` lets one run own a directory.
`metrics` and `retrieval` evaluate. `numerics` chooses the precision, and `cuda_graph` captures steps. `prefetch`
prepares the next batch.

- `hotbed.train.ranks`: How do ranks start, agree and share batches?
- `hotbed.train.runs`: How does a recipe become a run? `hotbed.train.runs.run` has the steps in order.
- `hotbed.train.workflows`: How are new rows scored, models trained every day, and towers used?
"""

from hotbed.train.metrics import Metrics, evaluate
from hotbed.train.trainer import Callback, Trainer

__all__ = ["Callback", "Metrics", "Trainer", "evaluate"]
