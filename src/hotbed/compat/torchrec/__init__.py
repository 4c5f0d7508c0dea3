"""Offer TorchRec's classes by their names, on hotbed's tables, so that a model needs another import only.

    from hotbed.compat.torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

`configs` describes tables, `tensors` holds ids and vectors, `modules` looks up, `parallel` shards and trains. What is
there does what TorchRec's documentation says of it. Batches may also be TorchRec's own ``KeyedJaggedTensor``, and
configs its own.
"""

from hotbed.compat.torchrec.configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from hotbed.compat.torchrec.keyed import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)
from hotbed.compat.torchrec.keyed_tensor import KeyedTensor, KTRegroupAsDict
from hotbed.compat.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from hotbed.compat.torchrec.optimizers import (
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from hotbed.compat.torchrec.parallel import DistributedModelParallel
from hotbed.compat.torchrec.pipeline import (
    Multistreamable,
    Pipelineable,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    state_dict_gather,
    state_dict_to_device,
)
from hotbed.compat.torchrec.planning import (
    CommType,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    QCommsConfig,
    ShardingEnv,
    ShardingType,
    Topology,
    get_qcomm_codecs_registry,
)
from hotbed.compat.torchrec.tensors import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    jt_is_equal,
    kjt_is_equal,
)
from hotbed.compat.torchrec.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

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
