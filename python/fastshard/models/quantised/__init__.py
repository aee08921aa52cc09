"""Quantised weights: the tensors that make up one weight, and the requirements for them.

Each module handles one family of forms.
"""
