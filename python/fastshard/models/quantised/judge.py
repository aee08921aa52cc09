"""The check that every quantised weight is complete and matches the config, by names, dtypes and shapes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from ...common import codes
from ...common.errors import Finding
from ...common.patterns import PatternBudget
from ...common.records import replace
from ...common.regex import compile_when_used
from .forms import F8, FLOATS, Companion, Form, Sizes, Stored, Weight
from .quantisation_config import KNOWN, QuantisationConfig
from .settings import ImpossibleSettingError

__all__ = ["CODES", "Weight", "check_weights"]

Tensors = Mapping[str, Stored]
_NUMBERS = compile_when_used(r"(?<=\.)\d+(?=\.)")
#: Maximum number of findings of one kind.
_MOST_NAMED = 20
#: Dtypes that unquantised weights do not have.
CODES = F8 | {"F8_E8M0", "U8", "I8", "I32", "U32"}
#: Suffixes that other tensors have too.
_AMBIGUOUS = (".scale", ".scales", "_scales")
_COPY = "copy the file that holds it from the original checkpoint"


def check_weights(config: QuantisationConfig | None, tensors: Tensors) -> tuple[list[Weight], list[Finding]]:
    """Check quantised weights by names and shapes, and report missing and contradictory ones.

    Args:
        config: the model's quantisation config; None without one.
        tensors: dtype and shape of every tensor, by name.
    """
    if config is None:
        return [], list(_first(_unstated(tensors)))
    try:
        forms = [_wanting(form, tensors) for form in config.forms]
    except ImpossibleSettingError as error:
        return [], [_impossible(config, error)]
    if not forms:
        return [], []
    weights: dict[str, Weight] = {}
    faulty: set[str] = set()
    spelled = _spelling(tensors)
    found: list[Finding] = []
    for name, (dtype, shape) in tensors.items():
        if not (possible := _forms_of(name, dtype, forms)):
            continue
        module = possible[0].module(name) or name
        # Where several may be meant that decides which fits.
        tried = [(form, sizes) for form in possible if (sizes := form.sizes(shape)) is not None]
        if not tried:
            found.append(_no_codes(name, possible[0], shape))
            continue
        judgements = [
            (form, sizes, *_companions(module, name, form, sizes, tensors, spelled)) for form, sizes in tried
        ]
        form, sizes, new_findings, companions = min(judgements, key=lambda one: bool(one[2]))
        found += new_findings
        faulty |= {module} if new_findings else set()
        stored = {one: tensors[one] for one in (name, *companions.values())}
        weights[module] = Weight(module, form, name, sizes, companions, stored)
    taken = {name for weight in weights.values() for name in (weight.codes, *weight.companions.values())}
    found += _orphans(forms, tensors, taken, config.is_before_compression)
    if not weights and config.is_of_what_is_stored and not any(map(_is_of_codes, tensors.values())):
        found.append(_none_at_all(config))
    if config.is_of_what_is_stored:
        found += _uneven(config, forms, weights, tensors)
    return [weight for module, weight in weights.items() if module not in faulty], list(_first(found))


def _wanting(form: Form, tensors: Tensors) -> Form:
    """Return a form without the companions that the entire model lacks."""
    companions = tuple(
        replace(
            one,
            required=one.required
            and not (one.by_all and not any(name.endswith(one.suffixes) for name in tensors)),
        )
        for one in form.companions
    )
    return replace(form, companions=companions)


def _is_of_codes(tensor: tuple[str, tuple[int, ...]]) -> bool:
    """Return True for a dtype that no unquantised weight has."""
    return tensor[0] in CODES and len(tensor[1]) >= 2


def _forms_of(name: str, dtype: str, forms: Iterable[Form]) -> list[Form]:
    """Return the forms whose codes a tensor may be; several if an expression in the config is undecidable."""
    named = ((form, form.module(name)) for form in forms if dtype in form.dtypes)
    return [form for form, module in named if module is not None and form.takes(module)]


def _companions(
    module: str,
    codes_name: str,
    form: Form,
    sizes: Sizes,
    tensors: Tensors,
    spelled: Callable[[Companion], str],
) -> tuple[list[Finding], dict[str, str]]:
    """Report problems with the companions of a weight, and return the names of the companions that exist."""
    found: list[Finding] = []
    there: dict[str, str] = {}
    for one in form.companions:
        names = [name for s in one.suffixes if (name := module + s) in tensors]
        found += [
            Finding.of(
                codes.UNKNOWN_TENSOR,
                f"{codes_name} has two tensors of {one.role}, and loaders differ in which one they use",
                tensor=name,
                expected=names[0],
                got=name,
                help="leave the stale one out (--exclude)",
            )
            for name in names[1:]
        ]
        if not names:
            if one.required and _is_needed(one, module, tensors):
                found.append(
                    Finding.of(
                        codes.MISSING_TENSOR,
                        f"{codes_name} is stored as {form.name}, and its {one.role} {_are(one)} missing",
                        tensor=f"{module}{spelled(one)}",
                        help=_COPY,
                    )
                )
            continue
        there[one.role] = name = names[0]
        dtype, shape = tensors[name]
        if dtype not in one.dtypes:
            found.append(
                Finding.of(
                    codes.DTYPE,
                    f"the {one.role} of {codes_name} {_are(one)} of another dtype than {form.name} needs",
                    tensor=name,
                    expected=" or ".join(sorted(one.dtypes)),
                    got=dtype,
                    help="restore the file that the quantiser wrote",
                )
            )
        elif one.shapes is not None and shape not in (fitting := [tuple(s) for s in one.shapes(sizes)]):
            found.append(_misfit(name, codes_name, one, sizes, shape, fitting))
    return found, there


def _spelling(tensors: Tensors) -> Callable[[Companion], str]:
    """Return the suffix that a checkpoint uses for a companion."""

    @functools.cache
    def is_used(suffix: str) -> bool:
        return any(name.endswith(suffix) for name in tensors)

    return lambda one: next(filter(is_used, one.suffixes), one.suffixes[0])


def _are(one: Companion) -> str:
    return "are" if one.role.endswith(("s", "maxima")) else "is"


def _is_needed(one: Companion, module: str, tensors: Tensors) -> bool:
    if one.where is None:
        return True
    suffix, dtypes = one.where
    return tensors.get(f"{module}{suffix}", ("", ()))[0] in dtypes


def _misfit(
    name: str,
    codes_name: str,
    one: Companion,
    sizes: Sizes,
    shape: tuple[int, ...],
    fitting: list[tuple[int, ...]],
) -> Finding:
    """Report companions with a wrong shape, and the possible cause."""
    usual = fitting[0] if fitting else ()
    why = ""
    if len(shape) >= 2 and (*shape[:-2], shape[-1], shape[-2]) in fitting:
        why = "; it fits the transposed weight"
    elif len(shape) == len(usual) >= 2 and all(a in (b, b - 1) for a, b in zip(shape, usual, strict=True)):
        why = "; the last, shorter block has none"
    return Finding.of(
        codes.SHAPE,
        f"the {one.role} of {codes_name} {_are(one)} not of its shape {list(sizes.shape)}{why}",
        tensor=name,
        expected=str(list(usual)),
        got=str(list(shape)),
        help="restore the file that the quantiser wrote",
    )


def _no_codes(name: str, form: Form, shape: tuple[int, ...]) -> Finding:
    return Finding.of(
        codes.SHAPE,
        f"the codes of a weight stored as {form.name} have another shape",
        tensor=name,
        expected="a matrix of codes",
        got=str(list(shape)),
        help="restore the file that the quantiser wrote",
    )


def _orphans(
    forms: Iterable[Form], tensors: Tensors, taken: set[str], may_be_plain: bool
) -> Iterator[Finding]:
    """Yield findings for companions whose weights are missing, or stored unquantised."""
    suffixes = {
        suffix: (form, one)
        for form in forms
        for one in form.companions
        for suffix in one.suffixes
        if one.role != "input scale"
    }
    named: set[str] = set()
    roles: set[str] = set()
    longest = sorted(suffixes, key=len, reverse=True)
    for name in tensors:
        if name in taken:
            continue
        suffix = next((s for s in longest if name.endswith(s)), None)
        if suffix is None:
            continue
        form, one = suffixes[suffix]
        module = name.removesuffix(suffix)
        codes_name = f"{module}{form.suffix}"
        if may_be_plain and f"{module}.weight" in tensors:
            continue
        if codes_name not in tensors:
            if suffix in _AMBIGUOUS and not roles:
                roles = {_NUMBERS.sub("{}", one) for one in taken}
            if (
                suffix in _AMBIGUOUS
                and tensors[name][0] in FLOATS
                and (len(tensors[name][1]) < 2 or _NUMBERS.sub("{}", name) not in roles)
            ):
                # What a norm or another module calls so.
                continue
            if codes_name in named:
                continue
            named.add(codes_name)
            yield Finding.of(
                codes.MISSING_TENSOR,
                f"its {one.role} {_are(one)} stored, but the codes are missing",
                tensor=codes_name,
                file=None,
                help=_COPY,
            )
        elif any(tensors[codes_name][0] in other.dtypes for other in forms if other.suffix == form.suffix):
            # A form that is for other modules by the config.
            continue
        elif suffix != ".scale" and tensors[codes_name][0] not in CODES:
            yield Finding.of(
                codes.UNKNOWN_TENSOR,
                f"{one.role} of {codes_name}, which is stored as {tensors[codes_name][0]} and needs none",
                tensor=name,
                help="leave out the stale tensor (--exclude); it is from the model before or after it was "
                "quantised",
            )


def _impossible(config: QuantisationConfig, error: ImpossibleSettingError) -> Finding:
    place = "header" if config.file.startswith("the header") else config.file
    return Finding.of(
        codes.CONFIG_DISAGREES,
        f"{config.file} states {error.key} {error.got} for weights quantised by {config.method}, so no code "
        "has a value",
        file=config.file if config.file.endswith(".json") else None,
        expected=f"{error.key}: {error.expected}",
        got=error.got,
        help=f"restore the {place} of the quantised model (from its download, or as the quantiser saved it)",
    )


def _none_at_all(config: QuantisationConfig) -> Finding:
    return Finding.of(
        codes.CONFIG_DISAGREES,
        f"{config.file} states that weights are quantised ({config.method}), but none is",
        file=config.file,
        expected="quantised weights",
        got="only plain tensors",
        help="leave quantization_config out of config.json if the weights were dequantised",
    )


def _uneven(
    config: QuantisationConfig, forms: Iterable[Form], weights: Mapping[str, Weight], tensors: Tensors
) -> Iterator[Finding]:
    """Yield findings for unquantised modules that are quantised in most layers or experts, unless a list
    names them.
    """
    by_role: dict[str, list[str]] = defaultdict(list)
    for module in weights:
        by_role[_NUMBERS.sub("{}", f"{module}.")].append(module)
    plain: dict[str, list[str]] = defaultdict(list)
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight")
        if module != name and module not in weights and len(shape) >= 2 and dtype not in CODES:
            role = _NUMBERS.sub("{}", f"{module}.")
            # A group, or a list of layers, may be for some of them alone; what fits no blocks is left by
            # transformers.
            if (
                role in by_role
                and any(form.takes(module) for form in forms)
                and _is_alike(shape, [weights[one] for one in by_role[role]])
            ):
                plain[role].append(module)
    for role, modules in plain.items():
        if config.skipped is None or len(modules) >= len(by_role[role]):
            # Where no list is kept the dtype alone tells, and models leave some as they are.
            continue
        for module in modules:
            if not config.skips(module):
                yield Finding.of(
                    codes.CONFIG_DISAGREES,
                    f"{module}.weight is stored as {tensors[f'{module}.weight'][0]}, but {config.file} "
                    f"states that it is quantised ({config.method})",
                    tensor=f"{module}.weight",
                    expected=f"{weights[by_role[role][0]].form.name}, "
                    f"as in {len(by_role[role])} other places",
                    got=tensors[f"{module}.weight"][0],
                    help="restore the file that the quantiser wrote, or list the module among the modules "
                    "that are not converted",
                )


def _is_alike(shape: tuple[int, ...], others: Iterable[Weight]) -> bool:
    """Return False for a weight whose shape differs from all others.

    The shape is unknown if codes are packed.
    """
    return any(one.form.dtypes.isdisjoint(F8) or one.sizes.shape == shape for one in others)


def _unstated(tensors: Tensors) -> Iterator[Finding]:
    """Yield a finding for the first weight that occurs only in quantised models, if no config states a
    quantisation.
    """
    forms = [
        (called, form)
        for module in dict.fromkeys(KNOWN.values())
        for called, config in module.telling.items()
        for form in module.forms(config, PatternBudget(called))
    ]
    for name, (dtype, shape) in tensors.items():
        for called, form in forms:
            base = form.module(name)
            if base is None or dtype not in form.dtypes or not form.takes(base) or form.sizes(shape) is None:
                continue
            needed = [one for one in form.companions if one.required and one.where is None]
            if all(_has(base, one, tensors) for one in needed):
                kind = next(
                    (
                        kind
                        for one in needed
                        for suffix, kind in one.kinds.items()
                        if f"{base}{suffix}" in tensors
                    ),
                    form.name,
                )
                yield Finding.of(
                    codes.CONFIG_DISAGREES,
                    f"{name} is stored as {called.format(kind)} with its {needed[0].role}, but no "
                    "quantization_config states that weights are quantised",
                    tensor=name,
                    expected="quantization_config in config.json",
                    got="none",
                    help="restore the config.json of the quantised model (from its download, or as the "
                    "quantiser saved it): without quantization_config every tool reads the codes as "
                    "values",
                )
                return


def _has(base: str, one: Companion, tensors: Tensors) -> bool:
    """Return True if a companion exists with the right dtype, since other tensors may have the same name."""
    return any(tensors.get(f"{base}{suffix}", ("", ()))[0] in one.dtypes for suffix in one.suffixes)


def _first(found: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings, limited to a readable number per kind."""
    counts: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in found:
        counts[finding.code, _NUMBERS.sub("{}", finding.tensor or "")].append(finding)
    for alike in counts.values():
        yield from alike[:_MOST_NAMED]
        if len(alike) > _MOST_NAMED:
            rest = alike[_MOST_NAMED]
            yield rest.replace(
                message=f"{rest.message}; the same holds for {len(alike) - _MOST_NAMED - 1:,} more",
                count=len(alike) - _MOST_NAMED,
            )
