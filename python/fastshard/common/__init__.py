"""Modules that every room uses: errors, dtypes, options, safe reading of small files."""
