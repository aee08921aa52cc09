"""A report page about a checkpoint: its description, missing parts, and value distributions."""
