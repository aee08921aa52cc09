"""One page about a checkpoint: what it is, what is missing, how its numbers are spread."""
