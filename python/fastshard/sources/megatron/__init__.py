"""Checkpoints of Megatron-LM: rank files, and what lies in torch_dist."""
