"""Compose: configuration, data, loop and checkpoints of a training run."""
