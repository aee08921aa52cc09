"""Checkpoints under Hugging Face names: saved in full, by ranks, or divided by another framework's rules."""
