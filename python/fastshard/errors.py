"""Findings, and the exception hierarchy."""

# The public path: what it is lies in fastshard.common.errors.
from .common.errors import CannotRunError, FastshardError, Finding, IncompleteError, ProblemError

__all__ = ["CannotRunError", "FastshardError", "Finding", "IncompleteError", "ProblemError"]
