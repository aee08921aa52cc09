"""Sources: which framework wrote a checkpoint's files, and where each tensor is stored in them.

:mod:`fastshard.models` describes what a model computes. A source only makes declarations; it does not read
tensors or compute values.
"""
