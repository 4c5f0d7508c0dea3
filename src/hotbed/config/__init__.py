"""The recipe: everything that a training run is, as one tree of plain values.

A `Recipe` is what a YAML file in ``recipes/`` holds and what every run and checkpoint keeps a copy of. Models,
optimizers and data sources are named by import path, so a user's own classes need no registration::

    model:
      class_path: my_package.MyModel
      init_args: {width: 512}

Importing this module is cheap and loads no class that a recipe names.
"""

from hotbed.config.component import Component, check_trust, import_from
from hotbed.config.parallel_memory import HotRecipe, MemoryOptions, MemoryRecipe, ParallelOptions, ParallelRecipe
from hotbed.config.recipe import (
    HIGHER_IS_BETTER,
    DataRecipe,
    DenseOptimizerGroup,
    Device,
    DynamicRecipe,
    InitRecipe,
    LinearLibrary,
    Monitor,
    Precision,
    Recipe,
    RetrievalRecipe,
    ScheduleRecipe,
    SparseOptimizerGroup,
    TaskRecipe,
    TrainRecipe,
)

__all__ = [
    "HIGHER_IS_BETTER",
    "Component",
    "DataRecipe",
    "DenseOptimizerGroup",
    "Device",
    "DynamicRecipe",
    "HotRecipe",
    "InitRecipe",
    "LinearLibrary",
    "MemoryOptions",
    "MemoryRecipe",
    "Monitor",
    "ParallelOptions",
    "ParallelRecipe",
    "Precision",
    "Recipe",
    "RetrievalRecipe",
    "ScheduleRecipe",
    "SparseOptimizerGroup",
    "TaskRecipe",
    "TrainRecipe",
    "check_trust",
    "import_from",
]
