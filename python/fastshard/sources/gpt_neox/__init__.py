"""Checkpoints of GPT-NeoX, which DeepSpeed writes."""
