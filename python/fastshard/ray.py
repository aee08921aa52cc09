"""A split run (:mod:`fastshard.conversion.distributed.split_runs`) whose parts are tasks of Ray: it is begun
and committed here, and its parts are written on the cluster's nodes.

Ray is imported only when it is needed.
"""

# The public path; the code is in fastshard.conversion.distributed.ray.convert.
from .conversion.distributed.ray.convert import convert, merge

__all__ = ["convert", "merge"]
