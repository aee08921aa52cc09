"""Tensors that must exist, with their shapes: by a reference, a config, or the other layers."""
