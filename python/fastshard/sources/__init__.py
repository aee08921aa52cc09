"""Sources: the framework that wrote a checkpoint's files, and the place of each tensor in them.

:mod:`fastshard.models` describes what a model computes. A source only declares; it reads no tensor and
computes nothing.
"""
