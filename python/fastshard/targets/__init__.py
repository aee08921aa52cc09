"""Targets: which files a framework loads, what they are called, and which of them is written last."""
