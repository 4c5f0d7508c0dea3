"""How do ranks exchange tensors? `Link` has the collectives; CPU tensors of ranks on one machine use shared memory."""

from hotbed.comm.collectives import Handle, Link, OneRank, Sizes, Tensors, reason, share_sizes, waits

__all__ = ["Handle", "Link", "OneRank", "Sizes", "Tensors", "reason", "share_sizes", "waits"]
