"""Formats that a library of their own reads and writes; nothing here is imported unless it is needed."""
