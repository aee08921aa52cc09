"""Checkpoints of ColossalAI."""
