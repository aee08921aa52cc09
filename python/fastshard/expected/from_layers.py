"""Comparison of repeated layers with each other, to find tensors that one layer lacks or has in another
shape.

Kinds of layers alternate (experts in every n-th layer, attention among state spaces, dense layers first), and
sizes may differ from layer to layer. So a layer is only compared with layers that have all of its tensors,
and these must agree.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from ..common import codes
from ..common.errors import Finding
from ..common.records import dataclass, field
from ..common.regex import compile_when_used

#: Shape and dtype of a full tensor.
ShapeDtype = tuple[tuple[int, ...], str]
#: Words before a layer number in a transformer, in contrast to the stages of a pyramid.
_LAYERS = frozenset(("layers", "layer", "blocks", "block", "h", "resblocks"))
#: Words before numbers of experts.
_EXPERTS = frozenset(("experts", "expert", "mlp_experts", "local_experts"))
#: Tensors that adapters and quantisers add to selected modules.
_ADDED = compile_when_used(r"lora_|scale|zero|quant|absmax|g_idx|nested|SCB|amax|packed|qweight|base_layer")
#: Names of layers within stages.
_STAGE = compile_when_used(r"((blocks|layers|h)\.)?\d+\.")
#: Modules of transformers and state-space models, which stacks of convolutions lack.
_BLOCK = compile_when_used(r"norm|ln_|attn|attention|mixer|mlp|mamba|ffn|feed_forward", re.IGNORECASE)
#: Minimum number of other layers that must agree before a deviation is an error.
_SISTERS = 3
#: The same minimum if the layer lacks the module completely, which may be intended.
_MANY = 5
#: Minimum number of modules in a layer: a norm and two matrices.
_MODULES = 3
#: Maximum number of tensors of one layer in findings.
_MOST_NAMED = 4
#: Number of experts of a layer to examine if all others are like them; no check compares as many.
_KEPT_EXPERTS = 8
_KEPT_NUMBERS = frozenset(map(str, range(_KEPT_EXPERTS)))
_EXPERT = compile_when_used(rf"(.*\.(?:{'|'.join(sorted(_EXPERTS))})\.)(\d{{1,6}})\.(.+)")


@dataclass
class Stack:
    """Numbered elements with one common prefix of names: ``model.layers.N``."""

    #: The name before the number, with the dot.
    prefix: str
    #: Tensors of each element, by the part of their names after the number.
    elements: dict[int, dict[str, ShapeDtype]]
    #: Numbers whose missing tensors a finding explains.
    lost: set[int] = field(default_factory=set)
    #: Number of further elements that are like the last one.
    further: int = 0

    @property
    def word(self) -> str:
        """The word before the number."""
        return self.prefix[:-1].rpartition(".")[2]

    @cached_property
    def is_layers(self) -> bool:
        """True for layers of a transformer.

        Their number is the outermost in the name, each consists of several modules, and they are not stages
        of layers.
        """
        if self.word not in _LAYERS or any(part.isdecimal() for part in self.prefix.split(".")):
            return False
        return all(
            len({rest.rpartition(".")[0] for rest in element}) >= _MODULES
            and not any(_STAGE.match(rest) for rest in element)
            and any(_BLOCK.search(rest) for rest in element)
            for element in self.elements.values()
        )

    @property
    def is_experts(self) -> bool:
        """True for the experts of one layer."""
        return self.word in _EXPERTS

    @property
    def count(self) -> int:
        """Number of elements, by the largest number in their names."""
        return max(self.elements.keys() | self.lost) + 1 + self.further

    @cached_property
    def holders(self) -> Counter[str]:
        """Number of elements that have each tensor."""
        return Counter(rest for element in self.elements.values() for rest in element)

    def gaps(self) -> list[int]:
        """List the numbers below the largest that have no tensors and that no finding mentions."""
        numbers = range(self.count - self.further)
        return [i for i in numbers if i not in self.elements and i not in self.lost]


@dataclass(frozen=True)
class FewExperts:
    """The tensors of a model, without experts that are like the preceding ones."""

    tensors: Mapping[str, ShapeDtype]
    #: Number of omitted experts, by the part of the name before their number.
    further: Mapping[str, int]


def leave_out_equal_experts(tensors: Mapping[str, ShapeDtype]) -> FewExperts | None:
    """Leave out all but the first experts of each layer; None if these do not represent the others.

    They do if the experts of each layer are numbered from 0 without gaps and have the same tensors with the
    same shapes and dtypes, and if all layers have the same number of experts.
    """
    experts: dict[str, dict[str, dict[str, ShapeDtype]]] = defaultdict(lambda: defaultdict(dict))
    kept: dict[str, ShapeDtype] = {}
    match = _EXPERT.match
    for name, stored in tensors.items():
        found = match(name)
        if found is None:
            kept[name] = stored
            continue
        prefix, number, rest = found.groups()
        experts[prefix][number][rest] = stored
        if number in _KEPT_NUMBERS:
            kept[name] = stored
    counts: dict[str, int] = {}
    for prefix, elements in experts.items():
        first = next(iter(elements.values()))
        place = re.sub(r"\d+", "*", prefix)
        if counts.setdefault(place, len(elements)) != len(elements):
            return None
        if any(str(at) not in elements for at in range(len(elements))):
            return None
        if any(element != first for element in elements.values()):
            return None
    further = {
        prefix: len(elements) - _KEPT_EXPERTS
        for prefix, elements in experts.items()
        if len(elements) > _KEPT_EXPERTS
    }
    return FewExperts(kept, further) if further else None


def stacks(
    tensors: Mapping[str, ShapeDtype], lost: Iterable[str] = (), further: Mapping[str, int] | None = None
) -> list[Stack]:
    """List all stacks of numbered names, in the order of the names.

    Args:
        tensors: tensors that exist.
        lost: names of missing tensors that a finding already reports.
        further: number of further elements that are like the last one, by the prefix of the stack.
    """
    found: dict[str, Stack] = {}
    for name, stored in tensors.items():
        for at, number, end in _numbered(name):
            stack = found.setdefault(name[:at], Stack(name[:at], {}))
            stack.elements.setdefault(number, {})[name[end:]] = stored
    for name in lost:
        for at, number, _ in _numbered(name):
            if name[:at] in found:
                found[name[:at]].lost.add(number)
    for prefix, count in (further or {}).items():
        found[prefix].further = count
    return list(found.values())


def _numbered(name: str) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers in a name: the start of each, the number, and the start of the next part."""
    at = 0
    for part in name.split(".")[:-1]:
        end = at + len(part) + 1
        if at and part.isdecimal() and len(part) < 7:
            yield at, int(part), end
        at = end


def find_repeated(stacks: Iterable[Stack]) -> set[str]:
    """Return the names that similar layers repeat, for which a missing tensor or a different shape is
    noticed."""
    return {
        f"{stack.prefix}{number}.{rest}"
        for stack in stacks
        if stack.is_layers
        for number, element in stack.elements.items()
        for rest in element
        if stack.holders[rest] > _SISTERS
    }


def check_stack(stack: Stack) -> Iterator[Finding]:
    """Check one stack of layers: ``FS102`` for tensors that one lacks, ``FS201`` and ``FS208`` for shapes."""
    if not stack.is_layers or len(stack.elements) <= _SISTERS:
        return
    yield from _lacking(stack)
    yield from _shapes(stack)


def _lacking(stack: Stack) -> Iterator[Finding]:
    """Yield findings about tensors that one layer lacks but all similar layers have."""
    total = len(stack.elements)
    usual = [(rest, n) for rest, n in stack.holders.items() if n >= _SISTERS and not _ADDED.search(rest)]
    for number, element in stack.elements.items():
        missing: dict[str, tuple[int, bool]] = {}
        likes: dict[str, list[int]] = {}
        modules = {name[: at + 1] for name in element for at, letter in enumerate(name) if letter == "."}
        for rest, count in usual:
            if rest in element:
                continue
            module = _left_of(rest, modules)
            if module not in likes:
                likes[module] = _alike(stack, number, module)
            # What layers of all kinds have is missed in one that is like no other, too.
            everywhere = not module and count == total - 1
            alike = [n for n in stack.elements if n != number] if everywhere else likes[module]
            if not alike or not all(rest in stack.elements[other] for other in alike):
                continue
            if module and len(alike) >= _SISTERS:
                missing[rest] = len(alike), True
            elif not module and number not in (0, stack.count - 1) and len(alike) >= _MANY:
                # A layer may do without a whole block of its kind, and then without its norm.
                missing[rest] = len(alike), False
        if not missing:
            continue
        blocks = {rest.partition(".")[0] for rest, (_, inside) in missing.items() if not inside}
        whole = len(blocks) > 1 or any(
            len({rest.rpartition(".")[0] for rest in missing if rest.startswith(f"{b}.")}) > 1 for b in blocks
        )
        yield from _list_missing(stack.prefix, number, missing, total, doubtful=whole)


def _left_of(rest: str, modules: set[str]) -> str:
    """Return the innermost module of a tensor of which a layer has any tensor, with its dot.

    The result is empty for the layer itself.
    """
    ends = [at + 1 for at, letter in enumerate(rest) if letter == "."]
    return next((rest[:end] for end in reversed(ends) if rest[:end] in modules), "")


def _alike(stack: Stack, number: int, module: str) -> list[int]:
    """List other layers that have all of this layer's tensors of a module.

    The list is empty if these layers mostly differ from each other.
    """
    own = {name for name in stack.elements[number] if name.startswith(module)}
    alike = {
        n: frozenset(name for name in element if name.startswith(module))
        for n, element in stack.elements.items()
        if n != number and own <= element.keys()
    }
    # Sizes that grow from layer to layer hold each other.
    most = max(Counter(alike.values()).values(), default=0)
    return list(alike) if 4 * most >= 3 * len(alike) else []


def _list_missing(
    prefix: str, number: int, missing: dict[str, tuple[int, bool]], total: int, *, doubtful: bool
) -> Iterator[Finding]:
    """Yield a finding for each tensor that a layer lacks; the last one counts the tensors beyond the
    limit."""
    names = list(missing)
    for i, rest in enumerate(names[:_MOST_NAMED]):
        alike, inside = missing[rest]
        more = len(names) - _MOST_NAMED if i == _MOST_NAMED - 1 else 0
        yield Finding.of(
            codes.MISSING_TENSOR,
            f"{alike} other layers have this tensor, and this layer lacks it"
            + (f"; this layer lacks {more} more" if more > 0 else ""),
            severity="error" if inside or not doubtful else "warning",
            tensor=f"{prefix}{number}.{rest}",
            expected=f"{prefix}*.{rest} in all of {total} layers"
            if alike == total - 1
            else "as in the other layers",
            got="nothing",
            help="copy the file that held it, which the index lacks too, or save the tensor again if the "
            "save dropped it",
        )


def _shapes(stack: Stack) -> Iterator[Finding]:
    """Yield findings about tensors that have the same shape in all layers except one."""
    odd: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for rest, count in stack.holders.items():
        if count <= _SISTERS or _ADDED.search(rest):
            continue
        of = {n: element[rest] for n, element in stack.elements.items() if rest in element}
        shapes = Counter(shape for shape, _ in of.values())
        if len(shapes) != 2 or min(shapes.values()) != 1:
            continue
        common = shapes.most_common(1)[0][0]
        number, (_, dtype) = next((n, h) for n, h in of.items() if h[0] != common)
        if all(kind == dtype for _, kind in of.values()):
            odd.setdefault(number, []).append((rest, common))
    for number, deviating in odd.items():
        modules = {
            rest.rpartition(".")[0]
            for rest in stack.elements[number]
            if stack.holders[rest] > 1 and _of_its_own(stack, number, rest)
        }
        if len(modules) > 1 and number in (0, stack.count - 1):
            # What comes in and goes out may have another width.
            continue
        for rest, common in deviating[:_MOST_NAMED]:
            shape = stack.elements[number][rest][0]
            name, sisters = f"{stack.prefix}{number}.{rest}", stack.holders[rest] - 1
            if shape == common[::-1]:
                yield Finding.of(
                    codes.SHAPE,
                    f"the matrix is transposed, compared with {sisters} other layers",
                    tensor=name,
                    expected=str(list(common)),
                    got=str(list(shape)),
                    help="save the tensor again: it was saved transposed, or is from another model",
                )
                continue
            # Extents that are meant to differ do so wherever they meet: in the module before or behind, too.
            alone = len(modules) == 1
            code = codes.SLICE_AS_WHOLE if sliced(shape, common) else codes.SHAPE
            yield Finding.of(
                code,
                f"{sisters} other layers have another shape here"
                + (", and nothing else in this layer differs from them" if alone else ""),
                severity="error" if alone else "warning",
                tensor=name,
                expected=str(list(common)),
                got=str(list(shape)),
                help="merge the tensor from all ranks that hold it"
                if code == codes.SLICE_AS_WHOLE
                else "copy the file again: the tensor is from another model or run",
            )


def _of_its_own(stack: Stack, number: int, rest: str) -> bool:
    """Return True if no other layer has a tensor with this name and shape."""
    shape = stack.elements[number][rest][0]
    return all(
        n == number or rest not in element or element[rest][0] != shape
        for n, element in stack.elements.items()
    )


def sliced(shape: tuple[int, ...], whole: tuple[int, ...]) -> int:
    """Return how many slices of a shape make up a full shape along one dimension; 0 if none do."""
    if len(shape) != len(whole):
        return 0
    differing = [(n, w) for n, w in zip(shape, whole, strict=True) if n != w]
    if len(differing) != 1:
        return 0
    part, extent = differing[0]
    return extent // part if part and extent % part == 0 else 0
