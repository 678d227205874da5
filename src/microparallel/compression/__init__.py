"""Fewer bytes: what a rank sends of its gradients, and how all ranks read it."""
