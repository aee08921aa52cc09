"""Manifests, and checks of a checkpoint against an expected list of tensors."""

# The public path: what it is lies in fastshard.checkpoint.manifests.
from .checkpoint.manifests import MANIFEST_NAME, Manifest

__all__ = ["MANIFEST_NAME", "Manifest"]
