"""Checkpoints outside of local file systems: object stores and the Hub."""
