"""Models by what they compute, in terms that no framework owns, and each framework's terms for them.

A dialect reads the values that its framework keeps (a config, arguments, a yml) into a :class:`.Model`, and
writes such values from one. This room knows neither files nor the places of tensors.
"""
