"""Convert, merge and load checkpoints."""
