"""Provide TorchRec's classes on hotbed's tables, so that a model needs only a different import.

Example::

    from hotbed.compat.torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

The classes behave as TorchRec's documentation describes. Batches and configs may also be objects of TorchRec.
"""

from hotbed.compat.torchrec.distributed import (
    CommType,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    EmbeddingShardingPlanner,
    Multistreamable,
    ParameterConstraints,
    Pipelineable,
    QCommsConfig,
    ShardingEnv,
    ShardingType,
    Topology,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    get_qcomm_codecs_registry,
    state_dict_gather,
    state_dict_to_device,
)
from hotbed.compat.torchrec.jagged_tensor import JaggedTensor, KeyedJaggedTensor, jt_is_equal, kjt_is_equal
from hotbed.compat.torchrec.keyed_optimizers import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from hotbed.compat.torchrec.keyed_tensor import KeyedTensor
from hotbed.compat.torchrec.modules import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KTRegroupAsDict,
    PoolingType,
)
from hotbed.compat.torchrec.table_views import (
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)

__all__ = [
    "CombinedOptimizer",
    "CommType",
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "DataType",
    "DistributedModelParallel",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionSharder",
    "EmbeddingConfig",
    "EmbeddingShardingPlanner",
    "GradientClipping",
    "GradientClippingOptimizer",
    "JaggedTensor",
    "KTRegroupAsDict",
    "KeyedJaggedTensor",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "KeyedTensor",
    "Multistreamable",
    "OptimizerWrapper",
    "ParameterConstraints",
    "Pipelineable",
    "PoolingType",
    "QCommsConfig",
    "RowWiseAdagrad",
    "ShardingEnv",
    "ShardingType",
    "Topology",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "get_qcomm_codecs_registry",
    "in_backward_optimizer_filter",
    "jt_is_equal",
    "kjt_is_equal",
    "state_dict_gather",
    "state_dict_to_device",
]
