"""Draft a recipe for a graph of HugeCTR: hotbed's model, optimizers and sizes; ``hotbed init MODEL.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hotbed.errors import CheckpointError, RecipeError
from hotbed.files import yaml_text
from hotbed.specs import is_int

if TYPE_CHECKING:
    from hotbed.checkpoint.importers.hugectr_graph import Graph, Layer

_OPTIMIZERS = {  # of dense layers and of tables, by HugeCTR's name
    "SGD": ("torch.optim.SGD", "hotbed.optim.SGD"),
    "Adam": ("torch.optim.Adam", "hotbed.optim.Adam"),
    "AdaGrad": ("torch.optim.Adagrad", "hotbed.optim.Adagrad"),
}


class Model(NamedTuple):
    """hotbed's model of a graph: class, arguments, and what differs, in words."""

    name: str
    arguments: dict[str, Any]
    notes: list[str]


def draft_hugectr(path: Path, name: str) -> str:
    """Write a recipe for the model of a graph, as YAML.

    Parameters
    ----------
    path
        JSON that ``Model.graph_to_json`` wrote, or a configuration of earlier versions.
    name
        The run's.

    Raises
    ------
    RecipeError
        If it is no graph, a layer has no counterpart, which is named, or the layers are none of hotbed's models.
    """
    from hotbed.checkpoint.importers.hugectr_graph import read_graph

    try:
        graph = read_graph(path)
    except CheckpointError as error:
        raise RecipeError(f"{error}") from None
    model = _model(graph)
    dims = sorted({e.dim for e in graph.embeddings if e.dim > 1})
    dense, sparse, notes = _optimizers(graph)
    batch_size = _number(graph.config.get("solver"), "batchsize") or 2048
    tables = [
        f"#   {e.name}: {e.slots} features, dim {e.dim}, pooling {e.pooling}"
        + (f", {e.rows:,} rows" if e.rows is not None else "")
        for e in graph.embeddings
    ]
    lines = [
        f"# Drafted by `hotbed init` from HugeCTR's {path.name}: "
        f"numericals {graph.dense_features}, labels {graph.labels}, tables",
        *tables,
        "# of which here each feature has its own. `hotbed init DATA` drafts the data; name them in data.path, then:",
        "#   hotbed train THIS_FILE --dry_run",
        *(f"# {note}" for note in (*model.notes, *notes)),
        f"name: {yaml_text(name)}",
        "data:",
        f"  path: {yaml_text(f'prepared/{name}')}",
        f"  dim: {dims[-1] if dims else 1}",
        "model:",
        f"  class_path: hotbed.nn.{model.name}",
        f"  init_args: {_inline(model.arguments)}",
        "dense_optimizer:",
        f"  class_path: {dense[0]}",
        f"  init_args: {_inline(dense[1])}",
        "sparse_optimizer:",
        f"  class_path: {sparse[0]}",
        f"  init_args: {_inline(sparse[1])}",
    ]
    warmup = _number(_hyper(graph), "warmup_steps") or _number(graph.config.get("solver"), "warmup_steps")
    if warmup is not None and warmup > 1:
        lines += ["schedule:", f"  warmup_steps: {warmup}"]
    return "\n".join([*lines, "train:", f"  batch_size: {batch_size}"]) + "\n"


def _model(graph: Graph) -> Model:
    """Recognize one of hotbed's models by its layers."""
    from hotbed.checkpoint.importers.hugectr_graph import PRODUCTS

    products = graph.of_type(*PRODUCTS)
    widths = [layer.number("fc_param", "num_output") for layer in products]
    rates = {layer.options.get("rate") for layer in graph.of_type("Dropout")}
    notes = [f"{layer.name} ({layer.type}) is left out: MLPs here have ReLU and dropout." for layer in _others(graph)]
    dropout = {"dropout": max(cast("set[float]", rates))} if rates and all(isinstance(r, float) for r in rates) else {}
    if graph.of_type("Interaction"):
        at = graph.layers.index(graph.of_type("Interaction")[0])
        first = sum(graph.layers.index(layer) < at for layer in products)
        return Model("DLRM", {"bottom": widths[:first], "top": widths[first:], **dropout}, notes)
    if crosses := graph.of_type("MultiCross"):
        count = crosses[0].number("mc_param", "num_layers")
        rank = _number(crosses[0].options["mc_param"], "projection_dim")
        if rank is None:
            notes.append(f"Cross layers of {crosses[0].name} have a vector each (DCN), those here a matrix (DCN-V2).")
        return Model("DCNv2", {"layers": count, "low_rank": rank, "top": widths, **dropout}, notes)
    if graph.of_type("FmOrder2"):
        return Model("DeepFM", {"top": widths, **dropout}, notes)
    if graph.of_type("Add") and any(e.dim == 1 for e in graph.embeddings):
        return Model("WideDeep", {"top": widths, **dropout}, notes)
    raise RecipeError(
        f"{graph.path} is none of hotbed's models: it has neither Interaction (DLRM), MultiCross (DCNv2), FmOrder2 "
        "(DeepFM), nor an embedding of one column that is added (WideDeep); write the model in PyTorch, with "
        "hotbed.EmbeddingCollection, and name it in model.class_path"
    )


def _others(graph: Graph) -> list[Layer]:
    return graph.of_type("BatchNorm", "ELU", "Softmax", "Sub", "ElementwiseMultiply", "DotProduct")


def _optimizers(graph: Graph) -> tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]], list[str]]:
    """Translate the optimizer of a configuration; graphs alone have none."""
    given = graph.config.get("optimizer")
    kind = cast("Mapping[str, Any]", given).get("type") if isinstance(given, Mapping) else None
    lr = _hyper(graph).get("learning_rate")
    if kind not in _OPTIMIZERS or not isinstance(lr, int | float) or isinstance(lr, bool):
        notes = ["The graph names no optimizer; these are those of recipes/criteo_kaggle.yaml."]
        if kind is not None:
            notes = [f"HugeCTR's optimizer {kind} has no counterpart; these are those of recipes/criteo_kaggle.yaml."]
        return ("torch.optim.Adam", {"lr": 0.001}), ("hotbed.optim.RowWiseAdagrad", {"lr": 0.08}), notes
    dense, sparse = _OPTIMIZERS[cast("str", kind)]
    return (dense, {"lr": float(lr)}), (sparse, {"lr": float(lr)}), []


def _hyper(graph: Graph) -> Mapping[str, Any]:
    """Hyperparameters of the optimizer, ``…_hparam``."""
    given = graph.config.get("optimizer")
    if not isinstance(given, Mapping):
        return {}
    values = cast("Mapping[str, Any]", given)
    found = next((v for k, v in values.items() if k.endswith("_hparam") and isinstance(v, Mapping)), {})
    return {**cast("Mapping[str, Any]", found), **{k: v for k, v in values.items() if k == "learning_rate"}}


def _number(values: object, key: str) -> int | None:
    value = cast("Mapping[str, Any]", values).get(key) if isinstance(values, Mapping) else None
    return value if is_int(value) and value > 0 else None


def _inline(values: Mapping[str, Any]) -> str:
    """Write a mapping in one line."""
    return "{" + ", ".join(f"{key}: {_value(value)}" for key, value in values.items()) + "}"


def _value(value: object) -> str:
    if value is None:
        return "null"
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
