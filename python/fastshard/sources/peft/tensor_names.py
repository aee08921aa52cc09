"""The module and the factor to which an adapter's tensor belongs, according to its name.

Names in a saved adapter omit the adapter's name and begin with ``base_model.model.``. In a live model, each
name includes the adapter's name (``lora_A.default.weight``), and the base's tensors are below ``base_layer``.
source: peft utils/save_and_load.py (get_peft_model_state_dict), tuners/lora/layer.py
"""

from __future__ import annotations

from collections.abc import Iterable

from ...common.records import dataclass, field
from ...common.regex import compile_when_used

OUTER = "base_model.model."
#: The word for a factor, and the rest of the name after the adapter's own name.
_FACTORS = compile_when_used(
    r"^(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)\w+))?(?:\.(?P<part>weight|bias))?$"
)
_TOKENS = compile_when_used(r"^(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\.(?P<adapter>\w+))?$")
_SAVED = compile_when_used(r"^(?P<module>.+?)\.modules_to_save\.(?P<adapter>\w+)\.(?P<rest>.+)$")
#: Parts of names that precede the base's names in a live model.
_BEHIND = ("base_layer", "original_module", "token_adapter")


@dataclass
class Module:
    """The factors of one module: their names, by word."""

    #: Its own name, without wrappers.
    name: str
    #: Number of additional wrappers around its factors, one for each other adapted parameter of the module.
    depth: int = 0
    factors: dict[str, str] = field(default_factory=dict)
    #: The base's name for it.
    at: str = ""

    def __post_init__(self) -> None:
        self.at = self.at or self.name


@dataclass
class AdapterNames:
    """An adapter's tensors by its own names: modules with factors, full tensors, and the base's tensors."""

    modules: dict[tuple[str, int], Module] = field(default_factory=dict)
    #: Names of adapters in live models.
    adapters: set[str] = field(default_factory=set)
    #: Full tensors that replace the base's: stored name by own name.
    whole: dict[str, str] = field(default_factory=dict)
    #: The base's own tensors inside wrappers: stored name by own name.
    base: dict[str, str] = field(default_factory=dict)
    #: Tensors of the base that are no longer used in the computation.
    unused: set[str] = field(default_factory=set)


def read_names(names: Iterable[str], *, saved: bool, container: str = "") -> AdapterNames:
    """Read the names of an adapter's tensors.

    Args:
        names: names of all tensors.
        saved: whether they are from a saved adapter, in which tensors other than factors replace the base's.
        container: the prefix of all names.
    """
    found = AdapterNames()
    for name in names:
        own = name.removeprefix(container).removeprefix(OUTER)
        if match := _FACTORS.match(own):
            module, kind = match["module"], match["kind"]
            if match["part"] == "bias":
                kind += ".bias"
        elif match := _TOKENS.match(own):
            module, kind = match["module"], "tokens"
        elif match := _SAVED.match(own):
            found.adapters.add(match["adapter"])
            found.whole[f"{bare(match['module'])}.{match['rest']}"] = name
            continue
        elif ".original_module." in own:
            found.unused.add(name)
            continue
        elif saved:
            found.whole[bare(own)] = name
            continue
        else:
            if bare(own) != name:
                found.base[bare(own)] = name
            continue
        if match["adapter"]:
            found.adapters.add(match["adapter"])
        depth = sum(part in _BEHIND for part in module.split("."))
        one = found.modules.setdefault((bare(module), depth), Module(bare(module), depth))
        one.factors[kind] = name
    return found


def bare(name: str) -> str:
    """Remove the parts of a name that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _BEHIND)


def is_of_adapters(names: Iterable[str]) -> bool:
    """Return True if the names include factors."""
    return any(_FACTORS.match(name) or _TOKENS.match(name) for name in names)
