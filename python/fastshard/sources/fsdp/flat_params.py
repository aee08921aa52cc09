"""FSDP1's LOCAL_STATE_DICT: flat parameters without names.

With ``use_orig_params``, the pieces of each parameter are also stored, as views of one storage. In rank
order, they are the parameter's elements. Only a model's config states the parameter's shape. Without
``use_orig_params`` there are no names either.
source: torch/distributed/fsdp/{_state_dict_utils,_flat_param}.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ... import _core
from ...common import codes
from ...common.errors import FastshardError

#: source: torch/distributed/fsdp/_common_utils.py
_FLAT = "_flat_param"

#: A piece of a parameter: number of elements, file, tensor in the file, first element in the tensor.
Range = tuple[int, int, int, int]


def is_flat(distributed: Mapping[int, _core.Distributed]) -> bool:
    """Return True if the ranks store flat parameters."""
    return any(part["path"][-1].endswith(_FLAT) for one in distributed.values() for part in one["parts"])


def pieces(
    files: Mapping[int, int], listed: Mapping[int, Sequence[_core.StoredTensor]]
) -> tuple[dict[str, list[Range]], set[str]]:
    """Return the pieces of each parameter by name, in rank order, and the names of full tensors.

    Each rank stores all full tensors.

    Args:
        files: files of the ranks.
        listed: the tensors in them, by rank.

    Raises:
        FastshardError: ``FS514`` if flat parameters are stored without names.
    """
    found: dict[str, list[Range]] = {}
    whole: set[str] = set()
    flats = 0
    for rank, file in sorted(files.items()):
        tensors = listed[rank]
        storages = {t["storage"] for t in tensors if t["path"][-1].endswith(_FLAT)}
        flats += len(storages)
        for number, tensor in enumerate(tensors):
            name = ".".join(tensor["path"])
            if tensor["path"][-1].endswith(_FLAT):
                continue
            empty = tensor["shape"] == [0]
            if not empty and tensor["storage"] not in storages:
                whole.add(name)
                continue
            found.setdefault(name, [])
            if not empty:
                found[name].append((prod(tensor["shape"]), file, number, 0))
    if flats and not found:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "flat parameters of FSDP1 (LOCAL_STATE_DICT) state neither names nor shapes",
            help="save with StateDictType.SHARDED_STATE_DICT, or from FSDP with use_orig_params=True",
        )
    return {name: ranges for name, ranges in found.items() if name not in whole}, whole
