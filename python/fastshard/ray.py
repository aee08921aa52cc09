"""A run in parts (:mod:`fastshard.conversion.distributed.split_runs`) whose parts are tasks of Ray: begun and
committed here, made on the cluster's nodes.

Ray itself is imported when it is needed, and not before.
"""

# The public path: what it is lies in fastshard.conversion.distributed.ray.convert.
from .conversion.distributed.ray.convert import convert, merge

__all__ = ["convert", "merge"]
