"""Quantised weights: the tensors of a checkpoint that belong to one weight, and their requirements.

There is one module for each family of forms.
"""
