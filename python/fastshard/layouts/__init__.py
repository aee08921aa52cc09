"""Layout tables: the built-in TOML files and those that a user registers.

A table declares how one framework stores the tensors of one model family; see ``docs/layouts.md``
for the rule language.
"""

# The public path: what it is lies in fastshard.layouts.tables.
from .tables import family, get, is_registered, names, of_config, parse, register, table

__all__ = ["family", "get", "is_registered", "names", "of_config", "parse", "register", "table"]
