"""Manifests, and checking a checkpoint against what is expected of it."""

# The public path: what it is lies in fastshard.checkpoint.manifests.
from .checkpoint.manifests import MANIFEST_NAME, Manifest

__all__ = ["MANIFEST_NAME", "Manifest"]
