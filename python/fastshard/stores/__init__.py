"""Checkpoints outside of this host's file systems: object stores and the hub."""
