"""The use of a Hugging Face ``config.json``: a table if one fits its model, otherwise unchanged names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from .._core import Table
from ..common import codes, json_text, safe_files
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding, raise_errors
from ..common.listing import Folder, Listing
from ..common.records import replace
from ..common.regex import compile_when_used
from ..layouts import naming_schemes, tables
from ..layouts.declaration import Source, is_state
from ..layouts.wrapper_names import bare, wrapped
from ..models import config_json, huggingface, sidecar_files
from ..models.overridden_settings import find_overridden_config, is_config_json
from .base import Options

#: A name of a layer's tensor, with the prefix before ``layers``.
_LAYER = compile_when_used(r"^((?:[A-Za-z_]\w*\.)*?)layers\.\d+\.")
_NUMBER = compile_when_used(r"\d+")
#: Tensors that critics and reward models have instead of an output layer.
_VALUE_HEAD = compile_when_used(r"(^|\.)(value_head|v_head|score)\.(\w+\.)*weight$")
#: Keys that distinguish a Hugging Face config from other files of the same name.
_TELLING = {"model_type", "architectures", "transformers_version"}
#: The source named in findings about missing code.
AUTO_MAP = "auto_map of config.json"
#: The names that a transformers class loads.
_OWN_NAMES = "the names that save_pretrained writes"
#: Quantisation methods that keep the names and shapes of weights. source: transformers
#: quantizers/quantizer_finegrained_fp8.py
_PLAIN = ("fp8",)


def config_of(
    listing: Listing, folder: str, options: Options, *, above: bool = True
) -> tuple[dict[str, Any] | None, Path | None]:
    """Return the model's config: the given one, or config.json, or that of a reference.

    Folders are searched in the order of :func:`fastshard.models.sidecar_files.places`.

    Args:
        listing: contents of the root directories.
        folder: folder of the tensors.
        options: the caller's options.
        above: whether to search above the checkpoint too.

    Raises:
        FastshardError: ``FS211`` if it is not a JSON object, ``FS110`` if two parts of the checkpoint have
            different ones.
    """
    if options.config is not None:
        path = Path(options.config_path) if options.config_path else None
        # What is published as config.json is the file itself, if it is JSON.
        return options.config, path if path is not None and path.suffix == ".json" else None
    places = sidecar_files.places(listing, folder, above=above)
    path = next((path for place in places if (path := _config_in(listing, place))), None)
    if path is None:
        return options.reference_config or (None, None)
    label = _label(listing, path)
    text = safe_files.read_text(path, safe_files.MAX_TEXT, label=label)
    config = json_text.value(text, label, hook=json_text.read_pairs)
    if not isinstance(config, dict):
        raise FastshardError.of(codes.BAD_VALUE, "config.json is not an object", file=label)
    raise_errors(sidecar_files.differing(listing, [path]))
    return config, path


def find_overridden(source: Source, listing: Listing, folder: str, options: Options) -> list[Finding]:
    """Note each setting of ``--config`` that differs from the checkpoint's config.json.

    Args:
        source: the declaration.
        listing: contents of the root directories.
        folder: folder of the tensors.
        options: the caller's options.
    """
    override, model = options.override_config, source.model
    is_taken = model.config == override and model.dialect in (None, huggingface.DIALECT)
    if override is None or not is_taken or not is_config_json(override):
        return []
    found = (_config_in(listing, place) for place in sidecar_files.places(listing, folder))
    if (path := next((path for path in found if path), None)) is None:
        return []
    label = _label(listing, path)
    try:
        own = json_text.object_in(safe_files.read_text(path, safe_files.MAX_TEXT, label=label))
    except FastshardError:
        # What is wrong with it may be why there is another one.
        return []
    return find_overridden_config(own, override, label)


def _config_in(listing: Listing, place: Folder) -> Path | None:
    """Find the config.json of a folder.

    Inside a root directory, only listed files count; problems with other files are already reported.
    """
    path = place.path / "config.json"
    inside = _inside(listing, path)
    if not inside:
        return place.file("config.json")
    return path if any(listing.has(root, at.as_posix()) for root, at in inside) else None


def _inside(listing: Listing, path: Path) -> list[tuple[int, Path]]:
    """Return the root directories that contain a path, and its place in each. The folder of a named file is
    outside all of them.
    """
    named = listing.folders_named
    above = [folder for folder in path.parents if folder in named]
    return [(index, path.relative_to(folder)) for folder in above for index in named[folder]]


def _label(listing: Listing, path: Path) -> str:
    """Return a path as named in messages."""
    inside = _inside(listing, path)
    return str(inside[0][1] if inside else path)


def describe(
    source: Source,
    listing: Listing,
    config: dict[str, Any] | None,
    path: Path | None,
    names: Collection[str],
    *,
    outer: str = "",
) -> None:
    """Add the facts of a model's config to a declaration: axes, facts, and a table if one fits.

    If none fits, the names stay unchanged, and :attr:`.Description.no_table` of the declaration states the
    reason.

    Args:
        source: the declaration.
        listing: contents of the root directories.
        config: content of config.json, if there is one.
        path: the file that contains it.
        names: names of the stored tensors.
        outer: prefix before the model's own names.
    """
    if config is None or not (source.model.hf_names or config.keys() & _TELLING):
        return
    label = None if path is None else _label(listing, path)
    _refuse_no_model(config, label)
    promises = [
        *config_json.find_contradictions(config, label or "config.json"),
        *_find_missing_code(config, path),
        *_find_missing_modules(path),
    ]
    # An adapter has its base described once more.
    source.findings += [finding for finding in promises if finding not in source.findings]
    model = replace(source.model, config=config, config_file=path, unloaded=None)
    # Names of pipeline stages are joined already.
    source.names.own = bare(names) | source.names.own
    names = [source.names.own.get(n, n) for n in names]
    apart = tuple(source.names.other_prefixes)
    names = [
        n for n in names if n.startswith(outer) and not is_state(n) and not (apart and n.startswith(apart))
    ]
    stored = {name.removeprefix(outer) for name in names}
    if (changed := wrapped(sorted(stored))) is not None:
        # A trainer's names are no longer those that its config is for.
        by = f"{changed[1]} has changed the names ({changed[0]})"
        source.model = replace(model, no_table=by, unloaded=(outer + changed[0], _OWN_NAMES))
        return
    layout = config_json.layout_of(config, label)
    if layout is not None and _is_spelled_otherwise(layout, config, stored):
        layout = None
    beside = None if path is None else _quantiser_beside(listing, path)
    why = _why_not(config, layout, names, beside)
    source.model = replace(model, dialect=huggingface.DIALECT, no_table=why)
    strange = why is not None or not any(_LAYER.match(name) for name in names)
    if layout is not None and strange and (found := _spelled(layout, stored)) is not None:
        _take_spelling(source, config, label, found, stored, outer)
        return
    if layout is not None and why == _other_names(config) and "auto_map" not in config:
        # transformers' own class would find none of its tensors, and load what it makes up.
        source.model = replace(source.model, dialect=None)
    if layout is None or why is not None:
        return
    _take_layout(source, config, label, layout, names, stored, outer)


def with_plain_weights(source: Source, names: Collection[str]) -> Source:
    """Return the declaration of the model with its weights dequantised.

    A table may fit this model even if none fits the quantised one.

    Args:
        source: the declaration of the quantised model.
        names: own names of the tensors in this declaration.
    """
    config = config_json.unquantised(source.model.config or {})
    source = replace(source, model=replace(source.model, config=config or None))
    model, outer = source.model, source.names.prefix
    # Scales have names that a table does not know, where config.json says nothing of them.
    is_hf = model.hf_names or model.no_table == _other_names(config)
    if not config or not is_hf or source.binding.layout is not None or source.binding.own_table is not None:
        return source
    names = [name for name in names if name.startswith(outer) and not is_state(name)]
    stored = {name.removeprefix(outer) for name in names}
    label = None if model.config_file is None else str(model.config_file)
    layout = config_json.layout_of(config, label)
    if (
        layout is None
        or _is_spelled_otherwise(layout, config, stored)
        or wrapped(stored) is not None
        or _why_not(config, layout, names, None) is not None
    ):
        return source
    plain = source.thaw()
    plain.model = replace(model, dialect=huggingface.DIALECT, no_table=None)
    _take_layout(plain, config, label, layout, names, stored, outer)
    plain.freeze()
    return plain


def _find_missing_code(config: dict[str, Any], path: Path | None) -> list[Finding]:
    """Report modules named in a config's ``auto_map`` that are missing next to the config.

    Modules in another repository (``REPO--module.Class``) do not count.
    """
    named = config.get("auto_map")
    if path is None or not isinstance(named, dict):
        return []
    values = [one for value in named.values() for one in (value if isinstance(value, list) else [value])]
    modules = {
        one.rpartition(".")[0] for one in values if isinstance(one, str) and "." in one and "--" not in one
    }
    files = sorted(f"{module.replace('.', '/')}.py" for module in modules)
    missing = [file for file in files if not (path.parent / file).is_file()]
    return [
        Finding.of(
            codes.MISSING_FILE,
            "auto_map of config.json names code that is missing: transformers cannot load the model with "
            "trust_remote_code",
            severity="warning",
            file=file,
            evidence=AUTO_MAP,
            help="copy the file from the original model; fastshard never executes it",
        )
        for file in missing
    ]


def _find_missing_modules(path: Path | None) -> list[Finding]:
    """Report folders named in a modules.json next to a config that are missing or empty."""
    listed = None if path is None else path.parent / sidecar_files.MODULES
    if listed is None or not safe_files.is_file(listed):
        return []
    folders = sidecar_files.module_folders(listed)
    missing = [one for one in folders if not (listed.parent / one).is_dir()]
    return [
        Finding.of(
            codes.MISSING_FILE,
            "modules.json names a module that is missing: sentence-transformers cannot load the model",
            severity="warning",
            file=f"{one}/config.json",
            evidence="modules.json",
            help="copy the directory from the original model",
        )
        for one in missing
    ]


def _refuse_no_model(config: dict[str, Any], label: str | None) -> None:
    """Raise an error for a transformers config that does not describe a model."""
    if "transformers_version" in config and not config.keys() & {"model_type", "architectures"}:
        raise FastshardError.of(
            codes.BAD_VALUE,
            "the file is not a model config of transformers",
            file=label,
            expected="model_type or architectures",
            got="neither",
            help="pass the model's config.json; generation_config.json does not describe the model",
        )


def _take_layout(
    source: Source,
    config: dict[str, Any],
    label: str | None,
    layout: str,
    names: list[str],
    stored: set[str],
    outer: str,
) -> None:
    """Add a fitting table to a declaration, with the config's axes and facts.

    Args:
        source: the declaration.
        config: the model's config.
        label: its file, for messages.
        layout: name of the table.
        names: stored names of the model's tensors.
        stored: the model's own names for these tensors.
        outer: prefix before these names.
    """
    base = _base(tables.table(layout))
    begins = None if _names_most(layout, stored) else _beginning(names)
    prefix = f"{outer}{base}" if begins is None else begins
    source.binding.layout = layout
    # The table's own names, too, where the model's begin otherwise.
    stored = stored | {_own(name, base, prefix.removeprefix(outer)) for name in stored}
    source.binding.axes, source.binding.facts, source.binding.sets = config_json.described(
        config, label, stored, layout
    )
    # Of a model with towers a table describes the text model alone.
    source.index.is_provable = config_json.find_text_config(config) is None
    if outer or prefix != base:
        table = _prefixed(layout, base, prefix.removeprefix(outer))
        source.binding.table = table.with_rules([rule.renamed(outer + rule.name) for rule in table.rules])
    inner = prefix.removeprefix(outer)
    kind = config_json.architecture_of(config)
    # Classes with other heads may call the model below them otherwise. source: transformers
    # modeling_layers.py
    is_known = kind is None or kind.is_causal or kind.name.endswith("Model")
    is_own = config_json.is_of_transformers(layout) and "auto_map" not in config
    if inner not in ("", base) and is_known and is_own:
        # transformers puts its own base before names that lack it, and looks for no other.
        name = next(name for name in names if name.startswith(prefix))
        unloaded = (name, _own(name.removeprefix(outer), base, inner))
        source.model = replace(source.model, unloaded=unloaded)
    # What lies around the model may end as its own base does.
    is_base = not inner.endswith(base)
    headless = _take_head(source, kind, layout, stored, is_base)
    source.model = replace(source.model, family=layout.removeprefix("hf."), headless=headless)
    if source.binding.vocab_size:
        source.binding.axes.pop("V", None)


def _take_head(
    source: Source, kind: config_json.Architecture | None, layout: str, stored: set[str], is_base: bool
) -> str | None:
    """Declare whether there is an output layer over the vocabulary; if there is none, describe the kind of
    model.

    Args:
        source: the declaration.
        kind: the model's architecture according to the config.
        layout: name of its table.
        stored: names of its tensors.
        is_base: whether the names have the prefix of a model without a head.
    """
    # No head is in a layer, where most names are.
    outside = [name for name in stored if not _LAYER.search(name)]
    by_names = tables.table(layout).describe(None, outside)[1].get("head", False)
    if is_base if kind is None else not kind.is_causal:
        source.binding.facts["head"] = by_names
        source.findings += _own_head(kind, stored)
        return kind.name if kind else "a model without a head, by the names of its tensors"
    if not source.binding.facts.get("head") or by_names or (value := _value_head(stored)) is None:
        return None
    source.binding.facts["head"] = False
    source.findings.append(
        Finding.of(
            codes.IGNORED,
            f"the model has a value head ({value}) and no output layer over the vocabulary",
            severity="note",
            tensor=value,
        )
    )
    return f"a model with a value head ({value})"


def _spelled(layout: str, names: Collection[str]) -> str | None:
    """Return the framework whose names most of the tensors have."""
    for spelling, name in naming_schemes.tables(layout).items():
        table = tables.table(name)
        if 2 * sum(table.rule_of(one) is not None for one in names) > len(names):
            return spelling
    return None


def _take_spelling(
    source: Source,
    config: dict[str, Any],
    label: str | None,
    spelling: str,
    names: Collection[str],
    outer: str,
) -> None:
    """Add a table to a declaration that has another framework's names for the model."""
    model_type, framework = config.get("model_type"), naming_schemes.framework(spelling)
    if model_type not in naming_schemes.model_types(spelling):
        why = (
            f"{framework} has no model of the type {shown(model_type)}: its layout for the tensors is not "
            "known"
        )
        source.model = replace(source.model, dialect=None, no_table=why)
        return
    layout = str(config_json.layout_of(config))
    name = str(naming_schemes.tables(layout)[spelling])
    table = tables.table(name)
    source.binding.layout = name
    if outer:
        source.binding.table = table.with_rules([rule.renamed(outer + rule.name) for rule in table.rules])
    source.binding.axes, source.binding.facts, source.binding.sets = config_json.described(
        config, label, names, name
    )
    source.index.is_provable = True
    unloaded = (outer + min(names), _OWN_NAMES)
    source.model = replace(
        source.model,
        spelling=framework,
        family=layout.removeprefix("hf."),
        no_table=None,
        unloaded=unloaded,
    )
    if source.binding.vocab_size:
        source.binding.axes.pop("V", None)


def by_own_table(source: Source, table: Table, names: Collection[str]) -> Source:
    """Return the source with the caller's own layout table.

    Axes and facts still come from the config.
    """
    model = replace(source.model, family=table.family, no_table=None, headless=None)
    optimizer = replace(source.optimizer, rules=None)
    source = replace(
        source,
        model=model,
        optimizer=optimizer,
        binding=replace(
            source.binding, layout=table.name, table=None, own_table=table, generic=[], pass_unknown=False
        ),
    )
    config = model.config
    own = table if table.has_config else None
    source = replace(source, names=replace(source.names, own=bare(names)))
    names = [source.names.own.get(n, n) for n in names]
    label = None if model.config_file is None else str(model.config_file)
    if config is None or (
        own is None and (source.binding.axes or config_json.layout_of(config, label) is None)
    ):
        return source
    axes, facts, sets = config_json.described(config, label, names, own)
    if source.binding.vocab_size:
        axes.pop("V", None)
    if "tp" in source.binding.degrees:
        # Ranks hold rows of the padded vocabulary: what the files say of it goes before a config, which knows
        # the true one.
        axes.pop("P", None)
        axes |= {k: v for k, v in source.binding.axes.items() if k == "P"}
    model = replace(model, dialect=huggingface.DIALECT)
    return replace(
        source,
        model=model,
        binding=replace(source.binding, axes=axes, facts=facts, sets=sets),
        index=replace(source.index, is_provable=True),
    )


def _quantiser_beside(listing: Listing, config: Path) -> str | None:
    """Return the quantiser's own file next to a config.json."""
    inside = _inside(listing, config)
    return next(
        (
            n
            for n in config_json.QUANTISER_FILES
            if any(listing.has(root, at.with_name(n).as_posix()) for root, at in inside)
        ),
        None,
    )


def _why_not(
    config: dict[str, Any], layout: str | None, names: Iterable[str], beside: str | None
) -> str | None:
    """Return the reason why a model has no table; None if it has one.

    ``beside`` is a quantiser's file next to the config.
    """
    model_type = config.get("model_type")
    if layout is None:
        return f"model_type {shown(model_type)} has no layout table"
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if isinstance(quantised, dict) and method not in _PLAIN:
        return f"quantization_config ({shown(method)}) stores other tensors than the table has"
    if not _is_of(layout, names):
        return _other_names(config) if beside is None else f"{beside} stores other tensors than the table has"
    return None


def _other_names(config: dict[str, Any]) -> str:
    return f"the tensors have other names than a {shown(config.get('model_type'))} of transformers"


def _beginning(names: Iterable[str]) -> str | None:
    """Return the prefix before ``layers.N`` in most names; None if there are no such names."""
    found = Counter(match[1] for name in names if (match := _LAYER.match(name)))
    return found.most_common(1)[0][0] if found else None


def _base(table: Table) -> str:
    """Return the prefix of layer names in the table, which is that of the model without its head."""
    names = (rule.name.partition("layers.{L") for rule in table.rules)
    begins = next((before for before, found, _ in names if found), "")
    # One spelling will do: the others are known by the rules.
    return begins.strip("()").partition("|")[0]


def _of_layers(table: Table) -> Table:
    """Return the rules for a layer's tensors, with names starting at ``layers.``."""
    named = ((rule, rule.name.find("layers.{L")) for rule in table.rules)
    return table.with_rules([rule.renamed(rule.name[at:]) for rule, at in named if at >= 0])


def _is_of(layout: str, names: Iterable[str]) -> bool:
    """Return True if most layer tensors have names of the table, or if there are no layer tensors."""
    rules = _of_layers(tables.table(layout))
    kinds = _count_kinds(name[match.end(1) :] for name in names if (match := _LAYER.match(name)))
    fitting = sum(count for name, count in kinds if rules.rule_of(name) is not None)
    return 2 * fitting >= sum(count for _, count in kinds)


def _names_most(layout: str, names: Iterable[str]) -> bool:
    """Return True if the table has most layer tensors under the same names."""
    table = tables.table(layout)
    kinds = _count_kinds(name for name in names if _LAYER.match(name))
    return 2 * sum(count for name, count in kinds if table.rule_of(name) is not None) > sum(
        count for _, count in kinds
    )


def _count_kinds(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return one name of each kind, and the number of names that differ from it only in their numbers.

    A rule covers all numbers, and a model with a thousand experts has a million names.
    """
    kinds: dict[str, list[Any]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("{}", name), [name, 0])[1] += 1
    return [(name, count) for name, count in kinds.values()]


def _is_spelled_otherwise(layout: str, config: dict[str, Any], names: Collection[str]) -> bool:
    """Return True if the table lacks the names of a model whose names have several spellings.

    transformers renames such tensors on loading and saving; its own list of these models is used.
    """
    several = any(
        rule.name.startswith("(") and "layers.{L" in rule.name for rule in tables.table(layout).rules
    )
    is_composite = config_json.find_text_config(config) is not None
    if not (several or is_composite) or _names_most(layout, names):
        return False
    return _spelled(layout, names) is None


def _own(name: str, base: str, prefix: str) -> str:
    """Return the table's name for a tensor, given its stored name."""
    if name.startswith(prefix):
        return base + name.removeprefix(prefix)
    return name.removeprefix(prefix.removesuffix(base)) if prefix.endswith(base) else name


def _prefixed(layout: str, base: str, prefix: str) -> Table:
    """Return the table with the stored names, so that a merge keeps them."""
    table = tables.table(layout)
    outer = prefix.removesuffix(base) if prefix.endswith(base) else ""

    def stored(name: str) -> str:
        return prefix + name.removeprefix(base) if name.startswith(base) else outer + name

    return table.with_rules([rule.renamed(stored(rule.name)) for rule in table.rules])


def _value_head(names: Iterable[str]) -> str | None:
    """Return the value-head tensor of a critic or reward model that was saved with its language model's
    config.

    source: ColossalAI applications/ColossalChat coati/models/{critic,reward_model}.py, trl
        models/modeling_value_head.py
    """
    return next((name for name in names if _VALUE_HEAD.search(name)), None)


def _own_head(kind: config_json.Architecture | None, names: Iterable[str]) -> list[Finding]:
    """Report missing tensors that an architecture has instead of the output layer."""
    if kind is None:
        return []
    stored = tuple(names)
    return [
        Finding.of(
            codes.MISSING_TENSOR,
            f"architectures says {kind.name}, which has this tensor",
            tensor=head,
            help="copy the file that holds it again: the file is missing or truncated",
        )
        for head in kind.head
        if not any(name == head or name.endswith(f".{head}") for name in stored)
    ]
