"""Sources: whose files these are and where each tensor lies. What a model computes is said in
:mod:`fastshard.models`.

A source only declares; it reads no tensor and computes nothing.
"""
