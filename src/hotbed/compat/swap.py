"""Replace the embeddings of any model by hotbed's tables."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed.compat.drop_in import Embedding, EmbeddingBag, Mode
from hotbed.embed import EmbeddingCollection, collections_of
from hotbed.embed.shared_arenas import share_arenas
from hotbed.errors import SpecError, did_you_mean
from hotbed.ops import BackendName
from hotbed.pooling import Pooling
from hotbed.specs import MAX_DIM, Feature, RowDtype, Table

_DTYPES: dict[torch.dtype, RowDtype] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_Torch = nn.Embedding | nn.EmbeddingBag


def swap_embeddings(
    model: nn.Module, *, skip: Sequence[str] = (), seed: int | None = None, backend: BackendName = "auto"
) -> nn.Module:
    """Replace every ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model by a table of hotbed, in place.

    Calls stay as they are, and so do values, names in ``state_dict`` and what is frozen. Call it before optimizers are
    made: tables are no parameters any more, ``hb.optim.RowWiseAdagrad(model, lr=0.1)`` trains them, and
    ``torch.optim`` the rest. `hotbed.distribute` then shards the tables, by the names of their modules.

    Tables of one dim and dtype lie in one arena, which an optimizer updates by one launch. A module that is moved to
    another device, or copied, takes its rows along and is updated by itself: swap a model where it is to be trained.

    Parameters
    ----------
    model
        Any module. Embeddings that share a weight share a table. Tables keep the values that torch has drawn. Those on
        ``meta`` get values of the standard deviation that torch's would have, 1, when the model is distributed.
    skip
        Names of modules to leave as they are, as in ``model.named_modules()``; ``*`` stands for any characters.
    seed
        Seed of the initial values of tables on ``meta``, as for `EmbeddingCollection`. By default it is drawn from
        torch's generator, so that ``torch.manual_seed`` decides; several ranks take the seed of the first.
    backend
        As for `EmbeddingCollection`.

    Returns
    -------
    nn.Module
        The model; if it is an embedding itself, what replaces it.

    Raises
    ------
    SpecError
        If there is nothing to replace, or an embedding cannot be: its weight is also that of another layer, its
        gradients are scaled by frequency, its norm is not the Euclidean one, its dtype or width is none of tables, or
        its class, hooks or parametrizations do more than look up.

    Examples
    --------
    >>> model = nn.ModuleDict({"item": nn.EmbeddingBag(1000, 16, mode="sum"), "top": nn.Linear(16, 1)})
    >>> model = swap_embeddings(model)
    >>> model["item"](torch.tensor([3, 5, 8]), torch.tensor([0, 2])).shape
    torch.Size([2, 16])
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _Torch)}
    names = dict(model.named_modules(remove_duplicate=False))
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(f"skip has '{pattern}', which no module is called{did_you_mean(pattern, found)}")
    chosen = {n: m for n, m in found.items() if not any(fnmatchcase(n, pattern) for pattern in skip)}
    if not chosen:
        raise SpecError(
            f"{type(model).__name__} has no nn.Embedding or nn.EmbeddingBag to replace"
            + (f" except the modules to skip: {', '.join(found)}" if found else "")
        )
    for name, module in chosen.items():
        _check(name, module)
    _refuse_shared(model, chosen)
    draws = seed is None and any(module.weight.is_meta for module in chosen.values())
    if seed is None:
        seed = int(torch.randint(1 << 62, (), device="cpu")) if draws else 0
    tables = [(_table(named, seed, backend), named) for named in _by_weight(chosen)]
    for rows, _ in tables:
        rows.is_swapped = True
    share_arenas({rows: next(iter(named.values())).weight.device for rows, named in tables})
    made: dict[int, nn.Module] = {}
    for rows, named in tables:
        made |= _replacements(rows, named)
    for name, module in names.items():  # a module may be at several places
        if id(module) in made and name:
            parent, _, own = name.rpartition(".")
            setattr(names[parent], own, made[id(module)])
    swapped = made.get(id(model), model)
    for module in swapped.modules():
        if not isinstance(module, Embedding | EmbeddingBag | EmbeddingCollection) and collections_of(module):
            for name in ("requires_grad_", "zero_grad"):
                setattr(module, name, _WithTables(module, name))
    return swapped


class _WithTables:
    """A method of a module that contains tables, called for them, too, because they are no parameters of it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name  # the module has this, and a cycle would keep it alive

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._live()
        result = getattr(type(module), self._name)(module, *args, **kwargs)
        for tables in collections_of(module).values():
            getattr(tables, self._name)(*args, **kwargs)
        return result

    def _live(self) -> nn.Module:
        if (module := self._module()) is None:
            raise SpecError(
                f"{self._name} belongs to a module that is gone: got a shallow copy of it, expected the module or a "
                "deep copy. Copy modules with copy.deepcopy"
            )
        return module

    @override
    def __reduce__(self) -> Any:
        return _WithTables, (self._live(), self._name)


def _check(name: str, module: _Torch) -> None:
    """Raise `SpecError` for an embedding that tables cannot replace."""
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    label = f"{type(module).__name__} '{name}'"
    weight = module._parameters.get("weight")
    if weight is None:
        wrong = "has a parametrization or no weight, which tables do not have"
    elif own := _own(type(module), kind) + [*module._parameters, *module._buffers, *module._modules][1:]:
        wrong = f"has a {own[0]} of its own, which a table would not have"
    elif _has_hooks(module, weight):
        wrong = "has hooks, which would be lost"
    elif module.scale_grad_by_freq:
        wrong = "has scale_grad_by_freq, which optimizers of tables do not know"
    elif module.max_norm is not None and module.norm_type != 2:
        wrong = f"has max_norm by norm_type {module.norm_type}, must be 2"
    elif weight.dtype not in _DTYPES:
        wrong = f"is {str(weight.dtype).removeprefix('torch.')}; tables are float32, bfloat16 or float16"
    elif weight.shape[1] > MAX_DIM:
        wrong = f"has {weight.shape[1]:,} columns, tables have at most {MAX_DIM:,}"
    else:
        return
    raise SpecError(f"{label} {wrong}; leave it as it is with skip=['{name}']")


def _own(derived: type, kind: type) -> list[str]:
    """List the methods that a class adds to torch's, except its constructor and ``reset_parameters``."""
    made = {"__init__", "reset_parameters"}
    classes = derived.__mro__[: derived.__mro__.index(kind)]
    return [name for of in classes for name, value in vars(of).items() if callable(value) and name not in made]


def _has_hooks(module: nn.Module, weight: Tensor) -> bool:
    """Say whether something is called when a module, or the gradient of its weight, is computed."""
    of_module = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_weight = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(module, hook) for hook in of_module) or any(getattr(weight, hook, None) for hook in of_weight)


def _refuse_shared(model: nn.Module, chosen: dict[str, _Torch]) -> None:
    """Raise `SpecError` where another layer has the weight of an embedding, which would be a parameter no more."""
    of_weight = {id(module.weight): name for name, module in chosen.items()}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if id(parameter) in of_weight and name not in chosen:
                theirs, here = of_weight[id(parameter)], f"{name}.{own}".lstrip(".")
                raise SpecError(
                    f"the weight of '{theirs}' is also '{here}', which a table could not be; leave it "
                    f"as it is with skip=['{theirs}']"
                )


def _by_weight(chosen: dict[str, _Torch]) -> Iterable[dict[str, _Torch]]:
    """Group modules that have the same weight."""
    groups: dict[int, dict[str, _Torch]] = {}
    for name, module in chosen.items():
        groups.setdefault(id(module.weight), {})[name] = module
    return groups.values()


def _table(named: dict[str, _Torch], seed: int, backend: BackendName) -> EmbeddingCollection:
    """Make the table of the modules of one weight, on ``meta``."""
    first, module = next(iter(named.items()))
    weight: Tensor = module.weight
    limits = {m.max_norm for m in named.values()}
    if len(limits) > 1:
        raise SpecError(
            f"{', '.join(map(repr, named))} share a weight and have different max_norm: {sorted(map(str, limits))}; "
            "give them the same"
        )
    table = Table(
        first or "weight",
        rows=weight.shape[0],
        dim=weight.shape[1],
        dtype=_DTYPES[weight.dtype],
        init_bound=_bound(module) if weight.is_meta else None,
        frozen=not weight.requires_grad,
    )
    features = [Feature(name or "weight", table.name, pooling=_pooling(m)) for name, m in named.items()]
    rows = EmbeddingCollection([table], features, seed=seed, device="meta", backend=backend)
    rows.to(weight.dtype)
    if limits != {None}:
        rows.max_norms[table.name] = cast(float, module.max_norm)
    return rows


def _replacements(rows: EmbeddingCollection, named: dict[str, _Torch]) -> dict[int, nn.Module]:
    """Fill the table of the modules of one weight, and make what replaces them, by their ids."""
    weight: Tensor = next(iter(named.values())).weight
    if not weight.is_meta:
        (table,) = rows.tables
        rows.set_weight(table, weight.detach())
    made: dict[int, nn.Module] = {}
    for feature, old in zip(rows.features, named.values(), strict=True):
        new = _drop_in(rows, feature.name, old)
        new.train(old.training)
        if not weight.is_meta:
            new.limit_norms()
        made[id(old)] = new
    return made


def _bound(module: _Torch) -> float:
    """Bound of uniform initial values of the deviation of torch's, 1; no row is longer than ``max_norm``."""
    longest = math.inf if module.max_norm is None else float(module.max_norm)
    return min(math.sqrt(3.0), longest / math.sqrt(module.embedding_dim))


def _pooling(module: _Torch) -> Pooling:
    """The pooling of a module's feature; of a mode that tables do not have, none."""
    if isinstance(module, nn.Embedding):
        return "sum"
    return "none" if module.mode == "max" else cast(Pooling, module.mode)


def _drop_in(rows: EmbeddingCollection, feature: str, old: _Torch) -> Embedding | EmbeddingBag:
    if isinstance(old, nn.Embedding):
        return Embedding(rows, feature, old.padding_idx, old.max_norm)
    return EmbeddingBag(
        rows,
        feature,
        old.padding_idx,
        old.max_norm,
        mode=cast(Mode, old.mode),
        include_last_offset=old.include_last_offset,
    )
