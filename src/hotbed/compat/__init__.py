"""Train models that were written for ``torch.nn`` or TorchRec on hotbed's tables.

`swap_embeddings` replaces the ``nn.Embedding`` and ``nn.EmbeddingBag`` modules of a model.
`hotbed.compat.torchrec` provides TorchRec's classes under their own names.
"""

from hotbed.compat.torch_nn import Embedding, EmbeddingBag, swap_embeddings

__all__ = ["Embedding", "EmbeddingBag", "swap_embeddings"]
