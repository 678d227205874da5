"""Replicas: the same model on every rank, the batch split between them."""
