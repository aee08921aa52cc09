"""torch.distributed.checkpoint saves that contain the state of an optimizer or a run, and no model.

Trainers store these in a folder next to the model's folder. The model may be in another format, so such a
folder is never treated as the model.
"""

from __future__ import annotations

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.regex import compile_when_used
from ...layouts.dcp_names import METADATA
from . import metadata as dcp_metadata

#: Names of tensors that are not part of a model: those below the optimizer's key, including Megatron-LM's
#: chained optimizers; those of an optimizer's state dict saved separately; and those of schedulers and random
#: generators. source: accelerate utils/fsdp_utils.py, NeMo Automodel
#: components/checkpoint/stateful_wrappers.py, Megatron-LM core/dist_checkpointing, core/optimizer
_OF_STATE = compile_when_used(
    r"^(?:chained_\d+\.)?optim\w*\.|^(?:state|param_groups)\..*\.(?:step|exp_avg\w*|max_exp_avg_sq|momentum_buffer|lr)$"
    r"|^(?:\w*sched\w*|rng\w*|dataloader)[./]"
)

#: Suffixes of a model's tensor names. Names of optimizer state end with a slot's name.
_OF_WEIGHTS = (".weight", ".bias", ".kernel")


def holds_no_model(listing: Listing, file: File) -> bool:
    """Return True if no tensor of a save belongs to a model.

    Args:
        listing: contents of the root directories.
        file: its ``.metadata``.

    Raises:
        FastshardError: if the file cannot be read.
    """
    return names_no_model(dcp_metadata.read(listing, file))


def names_no_model(metadata: dcp_metadata.Metadata) -> bool:
    """Return True if no tensor in the metadata belongs to a model."""
    return all(_OF_STATE.match(entry["name"]) for entry in metadata["tensors"])


def shows_model(listing: Listing, file: File) -> bool:
    """Return True if most tensor names of a save are those of a model's weights.

    Args:
        listing: contents of the root directories.
        file: its ``.metadata``; the result is False if it cannot be read.
    """
    try:
        names = [entry["name"] for entry in dcp_metadata.read(listing, file)["tensors"]]
    except FastshardError:
        return False
    weights = [name for name in names if name.endswith(_OF_WEIGHTS) and not _OF_STATE.match(name)]
    return 2 * len(weights) > len(names)


def refuse_state_alone(listing: Listing) -> None:
    """Raise ``FS101`` if all existing saves are of this kind."""
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
