"""Tensors that must exist, with their shapes, according to a reference, a config, or other layers."""
