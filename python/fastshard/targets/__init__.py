"""Targets: the files that a framework loads, their names, and the file that is written last."""
