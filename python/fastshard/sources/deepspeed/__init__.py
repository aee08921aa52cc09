"""Checkpoints of DeepSpeed: as written by a run, and universal ones."""
