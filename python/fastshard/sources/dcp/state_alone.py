"""Saves of torch.distributed.checkpoint that hold the state of an optimizer or of a run, and no model.

Trainers save these in a folder beside the model's, which may be in another format: such a folder is never
taken for the model.
"""

from __future__ import annotations

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.regex import compile_when_used
from ...layouts.dcp_names import METADATA
from . import metadata as dcp_metadata

#: Names of tensors that belong to no model: below the optimizer's key, with Megatron-LM's chained ones; an
#: optimizer's state dict saved by itself; what schedulers and random generators hold. source: accelerate
#: utils/fsdp_utils.py, NeMo Automodel components/checkpoint/stateful_wrappers.py, Megatron-LM
#: core/dist_checkpointing, core/optimizer
_OF_STATE = compile_when_used(
    r"^(?:chained_\d+\.)?optim\w*\.|^(?:state|param_groups)\..*\.(?:step|exp_avg\w*|max_exp_avg_sq|momentum_buffer|lr)$"
    r"|^(?:\w*sched\w*|rng\w*|dataloader)[./]"
)

#: What names of a model's tensors end with. Those of an optimizer end with the name of a slot.
_OF_WEIGHTS = (".weight", ".bias", ".kernel")


def holds_no_model(listing: Listing, file: File) -> bool:
    """Return True if a save names no tensor of a model.

    Args:
        listing: contents of the roots.
        file: its ``.metadata``.

    Raises:
        FastshardError: if the file cannot be read.
    """
    return names_no_model(dcp_metadata.read(listing, file))


def names_no_model(metadata: dcp_metadata.Metadata) -> bool:
    """Return True if metadata names no tensor of a model."""
    return all(_OF_STATE.match(entry["name"]) for entry in metadata["tensors"])


def shows_model(listing: Listing, file: File) -> bool:
    """Return True if most tensors of a save are named as a model's weights are.

    Args:
        listing: contents of the roots.
        file: its ``.metadata``. One that cannot be read shows nothing.
    """
    try:
        names = [entry["name"] for entry in dcp_metadata.read(listing, file)["tensors"]]
    except FastshardError:
        return False
    weights = [name for name in names if name.endswith(_OF_WEIGHTS) and not _OF_STATE.match(name)]
    return 2 * len(weights) > len(names)


def refuse_state_alone(listing: Listing) -> None:
    """Raise ``FS101`` if such saves are all that there is."""
    files = [f for f in listing.files if f.name == METADATA and f.folder]
    if not files or not all(holds_no_model(listing, f) for f in files):
        return
    newest = files[-1].folder
    raise FastshardError(
        [
            Finding.of(
                codes.MISSING_FILE,
                "the model is missing: there is only the state of an optimizer or of the run",
                file=newest,
                expected="the model's files next to it",
                got="only the state",
                help=f"copy the model of this step from the node that saved it, or pass {newest} as CKPT to "
                "read only the state",
            )
        ]
    )
