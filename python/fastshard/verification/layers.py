"""Comparison of layer outputs of two models on the same input, to find where they begin to differ."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..common import codes, memory_budget
from ..common.errors import FastshardError, Finding
from ..common.formatting import runs
from ..common.option_checks import check_finite
from ..common.options import StrPath
from ..common.progress import Progress, Report
from ..common.records import asdict, dataclass
from ..conversion.load_model import open_view
from ..evaluation import layer_outputs
from ..evaluation.layer_outputs import EMBEDDING, HEAD, LOGITS, LayerOutputs, Namer, is_record, read_record
from ..evaluation.layerwise_model import LayerwiseModel, Unit
from ..evaluation.token_batches import make_batch

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ..checkpoint.checkpoint import Checkpoint
    from ..common.options import Loading
    from ..conversion.in_memory import View

__all__ = ["ComparedUnit", "LayerComparison", "layers"]

#: Allowed relative difference of a layer's outputs between implementations, by the dtype of the computation.
#: Measured: 2e-3 to 5e-3 per layer for bfloat16 against float32; 2e-2 and more for damage.
_NOISE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2, "float64": 1e-8}
#: A unit stands out if its difference exceeds the median of the layers by this factor.
_TIMES = 5.0
#: Advice if all layers differ.
_SETTING = "look for a wrong setting in the config, or for one wrong tensor in each layer"
#: Keys of a config that do not affect what a model computes.
_ASIDE = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")
LENGTH, MOST = 128, 256


@dataclass(frozen=True)
class ComparedUnit:
    """A unit that both models have, compared on the same input.

    Examples:
        >>> fastshard.layers("model", "edited", tokens=[1, 2, 3, 4]).units[0]
        ComparedUnit(name='input_embedding', relative=0.0, largest=0.0, differs=False)
    """

    #: ``layers.N``, ``input_embedding``, ``head``, ``logits``, or the path of another module.
    name: str
    #: Norm of the difference of the outputs divided by the norm of A's output, computed per token; the root
    #: mean square over all tokens.
    relative: float
    #: The largest value of any token.
    largest: float
    #: True if the difference is more than rounding.
    differs: bool


@dataclass(frozen=True)
class LayerComparison:
    """The units of two models on the same inputs: each unit of B receives the input of A's unit.

    So a damaged unit differs, but the units after it do not.

    Examples:
        >>> comparison = fastshard.layers("model", "edited", tokens=[1, 2, 3, 4])
        >>> [unit.name for unit in comparison.units]
        ['input_embedding', 'layers.0', 'layers.1', 'layers.2', 'gpt_neox.final_layer_norm', 'head', 'logits']
    """

    a: str
    b: str
    units: tuple[ComparedUnit, ...]
    #: The relative difference up to which a unit counts as equal; 0 if equal models give bit-identical
    #: outputs.
    tolerance: float
    #: Values of a config that differ, by key: A's and B's. Empty if A is a record.
    config: dict[str, tuple[Any, Any]]
    #: Number of tokens that were compared.
    tokens: int
    #: True if A is a trainer's record.
    is_record: bool
    findings: tuple[Finding, ...]
    #: What this run did not check, a line each.
    not_checked: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def differing(self) -> list[str]:
        """Names of the units that differ, in their order."""
        return [unit.name for unit in self.units if unit.differs]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, without the findings."""

        def finite(number: float) -> float | None:
            return number if math.isfinite(number) else None

        units = [
            asdict(u) | {"relative": finite(u.relative), "largest": finite(u.largest)} for u in self.units
        ]
        return {
            "a": self.a,
            "b": self.b,
            "tokens": self.tokens,
            "tolerance": self.tolerance,
            "differing": self.differing,
            "units": units,
            "config": {key: list(values) for key, values in self.config.items()},
        }


@memory_budget.kept
def layers(
    a: StrPath | Checkpoint | View,
    b: StrPath | Checkpoint | View,
    *,
    text: StrPath | None = None,
    tokens: Any = None,
    tolerance: float | None = None,
    sequence_length: int = LENGTH,
    max_tokens: int = MOST,
    device: str = "cpu",
    memory: str | int | None = None,
    progress: Report = False,
    **options: Unpack[Loading],
) -> LayerComparison:
    """Compares the outputs of each layer of two models on the same input, from their checkpoints' shards.

    Each unit of B receives the input of the same unit of A, so that exactly the damaged units differ.
    Undamaged units of two models with the same class and dtype have bit-identical outputs. If both
    checkpoints have the same names, :func:`fastshard.diff` compares their tensors at a lower cost; outputs
    also show differences outside the tensors, such as a config setting.

    Args:
        a: the known-good model: a checkpoint, a view, or a file that a trainer wrote with
            :func:`fastshard.integrations.record`.
        b: the other model: a checkpoint or a view.
        text: as for :func:`fastshard.loss`; the tokenizer is A's.
        tokens: as for :func:`fastshard.loss`; a record has its own.
        tolerance: relative difference up to which a unit counts as equal; default: 0 for two models of the
            same class and dtype, otherwise a value that depends on the dtype.
        sequence_length: maximum number of tokens in a sequence.
        max_tokens: maximum total number of tokens. The outputs of all layers for them stay in memory.
        device: the device that computes.
        memory: memory limit of the process; a run that needs more is refused before it starts.
        progress: progress of the weights, as for :func:`fastshard.convert`.
        options: as for :func:`fastshard.open` with a target, for both.

    Returns:
        The comparison; its findings have an error (``FS320``) for units that differ.

    Raises:
        FastshardError: as :func:`fastshard.loss`; ``FS515`` if the models have different numbers of layers.
        ImportError: without transformers and torch.

    Examples:
        >>> comparison = fastshard.layers("model", "edited", tokens=[1, 2, 3, 4])
        >>> comparison.ok, comparison.differing
        (False, ['head'])
    """
    check_finite("tolerance", tolerance, least=0)
    limit = memory_budget.get_limit()
    with Progress(progress) as bar:
        if is_record(a):
            if text is not None or tokens is not None:
                raise FastshardError.of(
                    codes.USAGE, "a record brings its own tokens", help="leave out --text and --tokens"
                )
            right, config = read_record(a), None  # type: ignore[arg-type]
        else:
            model = LayerwiseModel(open_view((a,), options), device)
            batch = make_batch(model, text, tokens, sequence_length, max_tokens)
            model.check_memory(limit, batch.ids.numel(), keeps_outputs=True)
            right = layer_outputs.run(model, batch.ids, str(a), _count(bar.phase("running A"), model.nbytes))
            config = model.config
            model.release()
        other = LayerwiseModel(open_view((b,), options), device)
        other.check_memory(limit, right.tokens.numel(), keeps_outputs=True)
        _check_fit(right, other, str(b))
        if tolerance is None:
            tolerance = _choose_tolerance(right, other)
        units = _compare(right, other, tolerance, _count(bar.phase("running B"), other.nbytes))
        other.release()
    differences = {} if config is None else _diff_configs(config, other.config)
    gate = other.view.checkpoint.opened.gate
    return LayerComparison(
        str(a),
        str(b),
        tuple(units),
        tolerance,
        differences,
        right.tokens.numel(),
        right.is_record,
        tuple(gate.evaluate(_find(units, differences, str(b), other))),
        tuple(_list_unproven(right, other)),
    )


def _count(report: Any, total: int) -> Any:
    """Make the function that adds up the bytes of loaded units and reports them."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if report is not None:
            report(done, total)

    return count


def _check_fit(right: LayerOutputs, model: LayerwiseModel, b: str) -> None:
    """Refuse models whose layers cannot be compared.

    Raises:
        FastshardError: ``FS515``; ``FS211`` for tokens that B does not have.
    """
    own = len(model.layers)
    theirs = sum(re.fullmatch(r"layers\.\d+", name) is not None for name in right.outputs)
    if own != theirs:
        raise FastshardError.of(
            codes.USAGE,
            "the models have different numbers of layers",
            file=b,
            expected=f"{theirs}, as in {right.origin}",
            got=str(own),
        )
    if int(right.tokens.max()) >= model.vocab_size:
        raise FastshardError.of(
            codes.BAD_VALUE,
            "a token id is outside the model's embedding",
            file=b,
            expected=f"ids below {model.vocab_size}",
            got=str(int(right.tokens.max())),
        )


def _list_unproven(right: LayerOutputs, model: LayerwiseModel) -> list[str]:
    """List what a comparison of outputs on some tokens does not prove."""
    lines = [
        "whether weights that these tokens do not reach are equal: other rows of the embedding, experts "
        "that no token is routed to"
    ]
    own, theirs = model.vocab_size, int(right.outputs[LOGITS].shape[-1])
    if own != theirs:
        lines.append(f"whether the rows of the vocabulary beyond {min(own, theirs)} are padding")
    return lines


def _choose_tolerance(right: LayerOutputs, model: LayerwiseModel) -> float:
    """Choose the relative difference that counts as rounding: none for the same code in the same dtype."""
    own = str(model.dtype).removeprefix("torch.")
    if not right.is_record and right.model_class == model.class_name and right.dtype == own:
        return 0.0
    return max(_NOISE.get(dtype, 1e-2) for dtype in (own, right.dtype))


def _compare(
    right: LayerOutputs, model: LayerwiseModel, tolerance: float, on_load: Any
) -> list[ComparedUnit]:
    """Run B with its outputs replaced by A's, and compare each output before it is replaced."""
    names, seen = Namer(model), {}

    def replace_input(unit: Unit, given: torch.Tensor) -> torch.Tensor | None:
        # A record has no module for the embedding: what the first layer is given stands for it.
        if not right.is_record or names.name(unit) != "layers.0" or EMBEDDING in seen:
            return None
        return replace(EMBEDDING, given)

    def replace_output(unit: Unit, output: torch.Tensor) -> torch.Tensor | None:
        name = names.next(unit)
        if right.is_record and not name.startswith("layers."):
            return None
        return replace(name, output)

    def replace(name: str, own: torch.Tensor) -> torch.Tensor | None:
        theirs = right.outputs.get(name)
        if theirs is None or theirs.shape[:-1] != own.shape[:-1]:
            return None
        # Only a vocabulary is padded: of hidden states of another width nothing is common.
        is_comparable = theirs.shape == own.shape or name == HEAD
        seen[name] = _measure(theirs, own) if is_comparable else (math.inf, math.inf)
        return theirs.to(own) if theirs.shape == own.shape else None

    logits = model.run(right.tokens, on_load=on_load, on_input=replace_input, on_output=replace_output)
    seen[LOGITS] = _measure(right.outputs[LOGITS], logits)
    found = [relative for name, (relative, _) in seen.items() if name.startswith("layers.")]
    usual = sorted(found)[len(found) // 2] if found else 0.0
    return [
        ComparedUnit(
            name,
            relative,
            largest,
            relative > tolerance
            or (bool(tolerance) and relative > tolerance / 10 and relative > _TIMES * usual),
        )
        for name, (relative, largest) in seen.items()
    ]


def _measure(theirs: torch.Tensor, own: torch.Tensor) -> tuple[float, float]:
    """Measure the relative differences of two outputs' tokens: return their root mean square and maximum.

    If one output has more columns because of a padded vocabulary, the common columns are compared.
    """
    import torch

    width = min(theirs.shape[-1], own.shape[-1])
    largest, squares, count = 0.0, 0.0, 0
    for mine, other in zip(_split(own), _split(theirs), strict=True):
        right, left = other[:, :width].to("cpu", torch.float32), mine[:, :width].to("cpu", torch.float32)
        if torch.equal(left, right):
            count += len(right)
            continue
        ratios = (left - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)
        ratios = torch.nan_to_num(ratios, nan=math.inf)
        largest, squares = max(largest, float(ratios.max())), squares + float(ratios.double().square().sum())
        count += len(right)
    return math.sqrt(squares / max(count, 1)), largest


def _split(output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Divide an output into groups of tokens, because all logits in float32 would take too much memory."""
    groups: tuple[torch.Tensor, ...] = output.flatten(0, -2).split(64)  # type: ignore[no-untyped-call]
    return groups


def _diff_configs(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """List the values that differ between two configs, by key; a nested config's keys start with its name."""
    differences: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*a, *b}):
        mine, theirs = a.get(key), b.get(key)
        if key in _ASIDE or mine == theirs:
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            differences |= _diff_configs(mine, theirs, f"{prefix}{key}.")
        else:
            differences[f"{prefix}{key}"] = (mine, theirs)
    return differences


def _find(
    units: list[ComparedUnit], config: Mapping[str, tuple[Any, Any]], b: str, model: LayerwiseModel
) -> list[Finding]:
    """Find the units that differ: one finding for all layers, one for each other unit."""
    findings = []
    numbers = sorted({int(m[1]) for u in units if u.differs and (m := re.match(r"layers\.(\d+)", u.name))})
    hint = f"; the configs differ in {', '.join(config)}" if config else ""
    if numbers:
        which = ", ".join(str(r.start) if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in runs(numbers))
        is_all = len(numbers) == len(model.layers) > 1
        most = max(u.relative for u in units if u.differs and u.name.startswith("layers."))
        text = (
            "every layer computes"
            if is_all
            else f"layer{'s' * (len(numbers) > 1)} {which} compute{'s' * (len(numbers) == 1)}"
        )
        findings.append(
            Finding.of(
                codes.OUTPUTS_DIFFER,
                f"{text} a different output from the same input, by up to {most:.2g} of its norm{hint}",
                file=b,
                layers=range(numbers[0], numbers[-1] + 1) if len(runs(numbers)) == 1 else None,
                count=len(numbers),
                help="look for a wrong setting in the config, or for one wrong tensor in each layer"
                if is_all
                else None,
            )
        )
    findings += [
        Finding.of(
            codes.OUTPUTS_DIFFER,
            f"{u.name} computes a different output from the same input, by {u.relative:.2g} of its norm",
            file=b,
        )
        for u in units
        if u.differs and not u.name.startswith("layers.")
    ]
    return findings
