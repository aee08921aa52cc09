"""Checkpoints of Meta's torch_checkpointing: ``metadata.pkl`` and one file per item and rank."""
