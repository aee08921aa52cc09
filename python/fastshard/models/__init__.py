"""Models described by what they compute, in framework-neutral terms, and each framework's terms for them.

A dialect reads a framework's values (a config, arguments, a yml) into a :class:`.Model`, and writes such
values from a model. This package does not access files or the places of tensors.
"""
