"""Orbax, MaxText and Paxml: zarr arrays, plain or in OCDBT."""

from .adapter import Orbax

__all__ = ["Orbax"]
