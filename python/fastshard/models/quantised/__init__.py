"""Quantised weights: which tensors of a checkpoint belong to one weight, and what they must be. One module
for each family of forms."""
