"""Checkpoints of DeepSpeed: as a run writes them, and universal ones."""
