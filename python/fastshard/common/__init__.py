"""Modules that all other packages use: errors, dtypes, options, safe reading of small files."""
