"""Optimizer state in Megatron-LM's torch_dist checkpoints: by parameter, or in flat buffers.

source: megatron/core/optimizer/distrib_optimizer.py (`sharded_param_state_*`),
megatron/core/dist_checkpointing/optimizer.py
"""

from __future__ import annotations

import re
from typing import Any

from ...declared import Assembled, Optimizer, Source
from ...errors import Finding

#: Several optimizers are counted: chained_0, chained_1, ...
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_SLOT = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([A-Za-z0-9_]+)\.(.+)$")


def divide(
    source: Source, tensors: list[tuple[str, list[int], list[Any]]]
) -> list[tuple[str, list[int], list[Any]]]:
    """The weights among the tensors; what the optimizer keeps by parameter becomes slots of the source.

    State in flat buffers (``dp_reshardable``) has no parameters' names in the files: it is reported.
    """
    weights = [t for t in tensors if not _STATE.match(t[0])]
    shapes = {name: shape for name, shape, _ in weights}
    slots: dict[str, list[tuple[str, list[int], list[Any]]]] = {}
    unread = []
    for name, shape, pieces in tensors:
        if name in shapes:
            continue
        match = _SLOT.match(name)
        if match and shapes.get(match[2]) == shape:
            slots.setdefault(match[1], []).append((match[2], shape, pieces))
        else:
            unread.append(name)
    # fp32 masters are one slot among others: nothing in these files is compared with them.
    source.assembled += [Assembled(0, {}, None, slot, found) for slot, found in slots.items()]
    source.optimizer = Optimizer(moments_only=bool(slots or unread))
    if unread:
        source.optimizer.findings.append(
            Finding.of(
                "FS514",
                f"{len(unread)} tensors of the optimizer's state are not kept by parameter: they are not read",
                tensor=unread[0],
                severity="error",
                help="save it in the fully_reshardable form, or do without --optimizer",
            )
        )
    if slots:
        count = sum(map(len, slots.values()))
        source.findings.append(
            Finding.of(
                "FS212",
                f"{count} tensors of the optimizer's state ({', '.join(sorted(slots))}) are taken with --optimizer only",
            )
        )
    return weights
