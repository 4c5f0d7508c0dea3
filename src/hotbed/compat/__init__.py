"""Run models that were written for ``torch.nn`` or TorchRec on hotbed's tables.

`swap_embeddings` replaces the ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model; `hotbed.compat.torchrec` has
TorchRec's classes by their names.
"""

from hotbed.compat.torch_nn import Embedding, EmbeddingBag, swap_embeddings

__all__ = ["Embedding", "EmbeddingBag", "swap_embeddings"]
