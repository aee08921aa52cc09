"""Checkpoints of GPT-NeoX, written by DeepSpeed."""
