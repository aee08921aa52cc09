"""Models run from their shards: the loss of a checkpoint, and the outputs of its layers."""
