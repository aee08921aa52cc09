"""What a model computes, in words that no framework owns, and each framework's words for it.

A dialect reads the values that its framework keeps (a config, arguments, a yml) into a :class:`.Model`, and
writes them of one. Nothing here knows files or where tensors lie.
"""
