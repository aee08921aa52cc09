"""PEFT adapters: their config, their names, and their effect on a base model's tensors."""

from __future__ import annotations

import shlex

from ...common import codes
from ...common.errors import FastshardError, raise_errors
from ...common.listing import Listing
from ...layouts.declaration import Source, Unit
from ...layouts.declared_parts import StoredAdapter
from .. import hf_config
from ..base import Contents, Found
from . import adapter_config, base_names, lora_update, tensor_names
from .find_files import Files, find
from .missing_factors import find_missing_halves, find_missing_modules

__all__ = ["find", "merge"]


def merge(source: Source, files: Files, found: Found[object], listing: Listing, contents: Contents) -> Source:
    """Declare a base with an adapter merged into it.

    Args:
        source: declaration of the base, or of an adapter's training run, which contains both.
        files: the adapter's files.
        found: the base's files, followed by the adapter's tensor file, if it has one.
        listing: the base's listing.
        contents: contents of all files.

    Raises:
        FastshardError: as :func:`.lora_update.attach`; ``FS106`` for two adapters, ``FS101`` for
            none, ``FS514`` for a base without Hugging Face names.
    """
    source = source.thaw()
    config = adapter_config.read(files.config, files.config.name)
    shapes = _shapes(source, contents)
    own = tensor_names.is_of_adapters(shapes)
    file = found.files[0].path if files.weights is None else files.weights
    if own and files.weights is not None:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "both the checkpoint and the adapter directory hold adapter tensors",
            got=f"{found.files[0].path}, {files.weights}",
            help="pass only the config, to use the checkpoint's own tensors",
            run=[f"--adapter {shlex.quote(str(files.config))}"],
        )
    if not own and files.weights is None:
        raise FastshardError.of(
            codes.MISSING_FILE,
            "neither the checkpoint nor the adapter's directory has the adapter's tensors",
            file=str(files.folder),
            expected="adapter_model.safetensors",
            got="none",
            help="copy it from the original adapter",
        )
    if own:
        # The wrapper's own name is not a trainer's key.
        source.names.prefix = source.names.prefix.removesuffix(tensor_names.OUTER)
        # A container that the trainer saved the model in ({"model": ...}) is no part of the names.
        outer = {
            name.partition(tensor_names.OUTER)[0] for name in shapes if tensor_names.is_of_adapters([name])
        }
        container = outer.pop() if len(outer) == 1 else ""
        container = container if all(name.startswith(container) for name in shapes) else ""
        source.names.prefix = source.names.prefix.removeprefix(container)
        adapter = tensor_names.read_names(shapes, saved=False, container=container)
        source.names.own.update({stored: name for name, stored in adapter.base.items() if stored != name})
        source.names.own.update({stored: name for name, stored in adapter.whole.items() if stored != name})
        factors = {
            name for module in adapter.modules.values() for name in module.factors.values()
        } | adapter.unused
        added = shapes
        raise_errors(find_missing_halves(adapter, config, shapes, file, files.config))
        in_base = {*adapter.base, *adapter.whole, *shapes} - factors
        model = source.model
        if model.config is not None:
            renamed = dict(source.names.own)
            mine = [renamed.get(name, name) for name in shapes if name not in factors]
            hf_config.describe(source, listing, model.config, model.config_file, mine)
            source.names.own = renamed
    else:
        last = len(found.files) - 1
        if contents.readable(last):
            adapter = tensor_names.read_names(contents.listed(last), saved=True)
            base = {source.names.own.get(name, name): shape for name, shape in shapes.items()}
            source.files.units.append(Unit(file=last))
            added = _shapes_of(source.files.units[-1], contents)
            raise_errors(find_missing_halves(adapter, config, added, file, files.config))
            in_base = set(base)
            base_names.place(adapter, config, base, added, source.binding.table or source.binding.usual_table)
            shapes |= added
        else:
            return source
    if not (source.model.hf_names or own) or source.names.prefix or source.binding.degrees.get("tp", 1) > 1:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "an adapter can only be merged into full tensors under Hugging Face's own names",
            file=found.files[0].path,
            got=f"a checkpoint of {source.framework}",
            help="convert the base first, and merge the adapter into the result",
            run=["fastshard convert BASE OUT --to hf"],
        )
    raise_errors(find_missing_modules(adapter, config, file, in_base))
    # Before what the adapter makes of the config.
    source.files.adapter = StoredAdapter(
        config.stored, config.path, file, added, is_saved=not own, base=source.model.config
    )
    by_own = {source.names.own.get(name, name): shape for name, shape in shapes.items()}
    lora_update.attach(source, adapter, config, by_own | shapes)
    return source


def _shapes(source: Source, contents: Contents) -> dict[str, list[int]]:
    """Return the shapes of all tensors by their stored names."""
    found = {name: shape for a in source.files.assembled if a.slot is None for name, shape, _ in a.tensors}
    for unit in source.files.units:
        found |= _shapes_of(unit, contents)
    return found


def _shapes_of(unit: Unit, contents: Contents) -> dict[str, list[int]]:
    if not contents.readable(unit.file):
        return {}
    under = len(unit.under)
    found = {}
    for tensor in contents.tensors(unit.file):
        if tensor["path"][:under] == unit.under:
            key = ".".join(tensor["path"][under:])
            if unit.only is None or key in unit.only:
                found[unit.prefix + key.removeprefix(unit.strip)] = tensor["shape"]
    return found
