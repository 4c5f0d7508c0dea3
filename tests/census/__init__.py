"""Count what one training step asks of a CUDA device, on a machine that has none."""
