"""Verify, compare, hash and attest checkpoints."""
