"""Distribute a model as TorchRec does: ``DistributedModelParallel``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed.compat.torchrec.keyed import FusedOptimizer
from hotbed.compat.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from hotbed.compat.torchrec.optimizers import adopt_optimizers
from hotbed.config.places import MemoryOptions, ParallelOptions
from hotbed.embed import distribute
from hotbed.errors import SpecError
from hotbed.optim import SparseOptimizer
from hotbed.plan import Cut, Plan


class DistributedModelParallel(nn.Module):
    """Shard the tables of a model over all ranks, and copy the rest to each: `hotbed.distribute` by TorchRec's name.

    Parameters
    ----------
    module
        The model; tables and parameters on ``meta`` get their initial values here.
    env, sharders
        None: ranks are those of the default process group, and every table can be sharded in every way.
    device
        Where the model is to be; default: where it is, the CPU where that is ``meta``.
    plan
        A plan of hotbed, a scheme (``"table"``, ``"row"``, ``"column"``, ``"auto"`` …), or schemes by table; default
        ``"table"``. Plans of TorchRec are refused: the same model comes out of every plan, so none needs to be kept.
    parallel, memory
        As for `hotbed.distribute`.

    Attributes
    ----------
    module
        The distributed model.
    fused_optimizer
        What ``apply_optimizer_in_backward`` chose; its ``step`` does nothing, for backward has updated the tables.

    Raises
    ------
    SpecError
        If an argument is TorchRec's own and has no counterpart.
    """

    def __init__(
        self,
        module: nn.Module,
        env: None = None,
        device: torch.device | str | None = None,
        plan: Plan | str | Cut | Mapping[str, str | Cut] | None = None,
        sharders: None = None,
        *,
        parallel: ParallelOptions | None = None,
        memory: MemoryOptions | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("env", env), ("sharders", sharders)):
            if value is not None:
                raise SpecError(
                    f"DistributedModelParallel got {name}={type(value).__name__}, which hotbed does not use; leave it "
                    "out"
                )
        if plan is not None and not isinstance(plan, (Plan, str, Cut, Mapping)):
            raise SpecError(
                f"plan is a {type(plan).__name__}, must be a plan of hotbed or a scheme, 'table', 'row', 'column' or "
                "'auto'; a plan changes where rows are, not the model, so any will do"
            )
        collections = [m for m in module.modules() if isinstance(m, (EmbeddingBagCollection, EmbeddingCollection))]
        for collection in collections:
            adopt_optimizers(collection.table_views())
        self.module = distribute(module, "table" if plan is None else plan, parallel, memory, device=device)
        fused: dict[SparseOptimizer, list[str]] = {}
        for path, collection in self.module.named_modules():
            if isinstance(collection, (EmbeddingBagCollection, EmbeddingCollection)):
                start = f"{path}.{collection.views_name}".lstrip(".")
                for of in collection.fused_optimizers():
                    fused[of] = [f"{start}.{table}.weight" for g in of.param_groups for table in g["tables"]]
        self.fused_optimizer = FusedOptimizer(list(fused), list(fused.values()))

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the state of the model, by the names it has there; all ranks must call this."""
        return self.module.state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over what `state_dict` gave, here or in TorchRec."""
        return self.module.load_state_dict(state_dict, strict, assign)

    @override
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by the names that they have in the model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @override
    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers by the names that they have in the model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)
