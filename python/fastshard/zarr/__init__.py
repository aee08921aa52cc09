"""Zarr arrays and OCDBT, through TensorStore."""
