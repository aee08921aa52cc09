"""Checkpoints of Megatron-LM: rank files, and torch_dist."""
