"""A split run (:mod:`fastshard.conversion.distributed.split_runs`) whose parts are Ray tasks. This process
starts and commits the run; the cluster's nodes write the parts.

Ray is imported only when it is needed.
"""

# The public path; the code is in fastshard.conversion.distributed.ray.convert.
from .conversion.distributed.ray.convert import convert, merge

__all__ = ["convert", "merge"]
