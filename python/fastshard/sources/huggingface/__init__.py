"""Checkpoints under Hugging Face names: saved whole, by ranks, or divided under another's rules."""
