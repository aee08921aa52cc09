"""Orbax, MaxText and Paxml: zarr arrays, plain or in OCDBT."""
