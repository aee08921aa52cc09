"""Opened checkpoints, their tensors, plans and manifests."""
