"""Encode the values of rows as batches. Training, prediction and serving share this code, and so have equal inputs."""
