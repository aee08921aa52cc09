"""Checkpoints under Hugging Face names: full tensors, rank shards, or shards by another framework's rules."""
