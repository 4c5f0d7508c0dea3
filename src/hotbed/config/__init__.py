"""Define the recipe, the complete configuration of a training run as one tree of plain values.

The YAML files in ``recipes/`` are recipes, and every run and checkpoint stores a copy of its `Recipe`. Models,
optimizers and data sources are named by import path, so that your own classes need no registration::

    model:
      class_path: my_package.MyModel
      init_args: {width: 512}

Importing this module is fast, and does not import the classes that a recipe names.
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
