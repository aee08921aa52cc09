"""Names that wrappers and adapters have changed by inserting parts into a model's own names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

#: Parts of names that wrappers put in and that no model has: without them a name is the model's own.
#: source: torch (_dynamo/eval_frame.py, distributed/fsdp, distributed/algorithms/_checkpoint), Lightning
_TRANSPARENT = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_fpw_module": "FSDP",
    "_checkpoint_wrapped_module": "torch's activation checkpointing",
    "_forward_module": "Lightning",
}
#: Parts after which the model's own name cannot be recovered. source: PEFT, TRL
_WRAPPERS = {"base_layer": "PEFT", "modules_to_save": "PEFT", "pretrained_model": "TRL"}
#: The same for the beginning of a name.
_FIRST = {"module.": "DistributedDataParallel", "base_model.model.": "PEFT"}


def bare(names: Collection[str]) -> dict[str, str]:
    """Map names that a wrapper has changed to the model's own names.

    The result is empty if two tensors would have the same name.
    """
    found: dict[str, str] = {}
    # Most checkpoints have none: looking for the words in all names at once is quicker than parting each.
    for name in names if _have_any(names, ("_orig_mod", "_module")) else ():
        if "_orig_mod" in name or "_module" in name:
            own = ".".join(part for part in name.split(".") if part not in _TRANSPARENT)
            if own and own != name:
                found[name] = own
    if found and len({found.get(name, name) for name in names}) < len(set(names)):
        return {}
    return found


def _have_any(names: Iterable[str], words: Iterable[str]) -> bool:
    """Return True if any of the words occurs in the names."""
    text = "\n".join(names)
    return any(word in text for word in words)


def put_in(name: str) -> str | None:
    """Return the wrapper that added a part to a name, if :func:`bare` knows it."""
    return next((_TRANSPARENT[part] for part in name.split(".") if part in _TRANSPARENT), None)


def wrapped(names: Iterable[str]) -> tuple[str, str] | None:
    """Find a name that a wrapper or an adapter has changed, and the one that changed it; None if there is
    none.

    Adapter factors come first.
    """
    names = list(names)
    if not _have_any(names, ("lora_", *_TRANSPARENT, *_WRAPPERS, *_FIRST)):
        return None
    factor = next((name for name in names if ".lora_" in name), None)
    if factor is not None:
        return factor, "PEFT"
    for name in names:
        for part in name.split("."):
            if part in _WRAPPERS or part in _TRANSPARENT:
                return name, (_WRAPPERS | _TRANSPARENT)[part]
            if part.startswith("lora_"):
                return name, "PEFT"
        for first, wrapper in _FIRST.items():
            if name.startswith(first):
                return name, wrapper
    return None
