"""Checkpoints of DeepSpeed: as a run leaves them, and universal ones."""
