"""Distribute a model as TorchRec does: ``DistributedModelParallel``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from hotbed.compat.torchrec.keyed import FusedOptimizer
from hotbed.compat.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from hotbed.compat.torchrec.optimizers import adopt_optimizers
from hotbed.compat.torchrec.planning import Sharder, ShardingEnv, parallel_options
from hotbed.config.places import MemoryOptions, ParallelOptions
from hotbed.embed import Distributed, collections_of, distribute
from hotbed.embed.plan_names import plan_for
from hotbed.errors import SpecError
from hotbed.optim import SparseOptimizer
from hotbed.plan import Cut, Plan


class DistributedModelParallel(nn.Module):
    """Shard the tables of a model over all ranks, and copy the rest to each: `hotbed.distribute` by TorchRec's name.

    Parameters
    ----------
    module
        The model; tables and parameters on ``meta`` get their initial values here.
    env
        The ranks; default: those of the default process group, or this process.
    device
        Where the model is to be; default: where it is, the CPU where that is ``meta``.
    plan
        A plan of hotbed, e.g. of `EmbeddingShardingPlanner`, a scheme (``"table"``, ``"row"``, ``"column"``,
        ``"auto"`` …), or schemes by table; default ``"table"``. Plans of TorchRec are refused: the same model comes
        out of every plan, so none needs to be kept.
    sharders
        Optimizers of tables to which none was applied, and number formats of exchanges; default: SGD with lr 0.01, and
        float32.
    init_data_parallel, init_parameters
        Accepted for TorchRec's sake: parameters always get values.
    parallel, memory
        As for `hotbed.distribute`.

    Attributes
    ----------
    module
        The distributed model.
    device
        Where it is.
    fused_optimizer
        What trains the tables in backward; its ``step`` does nothing, for backward has updated the tables.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: Plan | str | Cut | Mapping[str, str | Cut] | None = None,
        sharders: Sequence[Sharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        *,
        parallel: ParallelOptions | None = None,
        memory: MemoryOptions | None = None,
    ) -> None:
        super().__init__()
        _check(env, sharders or ())
        if plan is not None and not isinstance(plan, (Plan, str, Cut, Mapping)):
            raise SpecError(
                f"plan is a {type(plan).__name__}, must be a plan of hotbed or a scheme, 'table', 'row', 'column' or "
                "'auto'; a plan changes where rows are, not the model, so any will do"
            )
        for collection in module.modules():
            if isinstance(collection, (EmbeddingBagCollection, EmbeddingCollection)):
                own = [s.fused_params for s in sharders or () if s.module_type is type(collection)]
                adopt_optimizers(collection.table_views(), next((params for params in own if params), {}))
        given = "table" if plan is None else plan
        self.module = distribute(module, given, parallel or parallel_options(sharders or ()), memory, device=device)
        own_device = next((c.device for c in collections_of(self.module).values()), torch.device("cpu"))
        self.device = own_device if device is None else torch.device(device)
        self._given = given
        fused: dict[SparseOptimizer, list[str]] = {}
        for path, collection in self.module.named_modules():
            if isinstance(collection, (EmbeddingBagCollection, EmbeddingCollection)):
                start = f"{path}.{collection.views_name}".lstrip(".")
                for of in collection.fused_optimizers():
                    fused[of] = [f"{start}.{table}.weight" for g in of.param_groups for table in g["tables"]]
        self.fused_optimizer = FusedOptimizer(list(fused), list(fused.values()))

    @property
    def plan(self) -> Plan:
        """Where the tables are."""
        if isinstance(self.module, Distributed):
            return self.module.plan
        return self._given if isinstance(self._given, Plan) else plan_for(self.module, 1, self._given)

    def init_data_parallel(self) -> None:
        """Do nothing: the model is ready."""

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


def _check(env: ShardingEnv | None, sharders: Sequence[Sharder]) -> None:
    """Raise `SpecError` for ranks that are not all, and for sharders that are not hotbed's."""
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if env is not None and env.world_size != world_size:
        raise SpecError(
            f"env has {env.world_size} ranks, expected all {world_size}. Leave env out, and start as many processes as "
            "there are ranks."
        )
    for sharder in sharders:
        if not isinstance(sharder, Sharder):
            raise SpecError(
                f"sharders has a {type(sharder).__name__}, expected sharders of hotbed.compat.torchrec. Import "
                "EmbeddingBagCollectionSharder from there, or leave sharders out."
            )
