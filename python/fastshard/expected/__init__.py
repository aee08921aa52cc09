"""Which tensors must exist, and with what shapes: by a reference, a config, or the other layers."""
