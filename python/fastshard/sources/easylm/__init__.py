"""EasyLM's streams of arrays."""
