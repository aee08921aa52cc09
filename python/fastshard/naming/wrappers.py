"""Names that are no longer a model's own: wrappers and adapters put parts of their own in."""

from __future__ import annotations

from collections.abc import Iterable

#: Parts of names that wrappers and adapters put in, by which no model's own names are told any more.
#: source: torch (_dynamo/eval_frame.py, distributed/fsdp, distributed/algorithms/_checkpoint), PEFT, TRL, Lightning
_WRAPPERS = {
    "_orig_mod": "torch.compile", "_fsdp_wrapped_module": "FSDP", "_checkpoint_wrapped_module": "torch's activation checkpointing",
    "_forward_module": "Lightning", "base_layer": "PEFT", "modules_to_save": "PEFT", "pretrained_model": "TRL",
}  # fmt: skip
#: The same where a name begins so.
_FIRST = {"module.": "DistributedDataParallel", "base_model.model.": "PEFT"}


def wrapped(names: Iterable[str]) -> tuple[str, str] | None:
    """A name that a wrapper or an adapter has changed, and which one did; None if there is none."""
    for name in names:
        for part in name.split("."):
            if part in _WRAPPERS:
                return name, _WRAPPERS[part]
            if part.startswith("lora_"):
                return name, "PEFT"
        for first, wrapper in _FIRST.items():
            if name.startswith(first):
                return name, wrapper
    return None
