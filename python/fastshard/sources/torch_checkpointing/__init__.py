"""Checkpoints of Meta's torch_checkpointing: ``metadata.pkl`` beside a file of each item and rank."""
