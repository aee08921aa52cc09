"""Conversions on a Ray cluster."""
