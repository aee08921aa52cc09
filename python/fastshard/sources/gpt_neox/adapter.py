"""GPT-NeoX checkpoints: names, arguments and configs in DeepSpeed's files, in pipeline and sequential form.

source: gpt-neox megatron/checkpointing.py, DeepSpeed runtime/engine.py and pipe/module.py
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.formatting import runs
from ...common.listing import Listing
from ...common.options import MAX_DEGREE
from ...common.ranks import Rank, rank_range
from ...common.regex import compile_when_used
from ...layouts.declaration import Source, SourceFiles, Unit
from ..base import Contents, Found, Options, as_dict, missing, unexpected
from ..rank_values import differing
from ..zero import optimizer_state
from ..zero.cross_checks import same_step
from ..zero.pipeline_names import pipeline_names
from ..zero.zero_files import ZeroFiles
from . import config as neox_config
from . import features

#: Maximum number of consecutive missing files to name one by one; above it, the first and the last are named.
_ONE_BY_ONE = 16

_STEP = compile_when_used(r"^(?:global_step)?(\d+)$")


def _blocks(layers: Iterable[int]) -> int:
    """Count transformer blocks by the layers that have files.

    Gaps at 1 and N+2 are normal, because those layers have no tensors. The last gap is before the norm.
    """
    blocks = {layer for layer in layers if layer <= neox_config.MAX_LAYERS}
    gaps = [b - 1 for b in blocks if b > 3 and b - 1 not in blocks]
    return max(gaps) - 2 if gaps else max((b for b in blocks if b >= 2), default=1) - 1


def _layers_missing(found: Found[ZeroFiles], absent: list[int], tp: int, why: str, got: str) -> list[Finding]:
    """Return the ranges of layers without a file."""
    findings = []
    for first, last in _runs(absent):
        names = [
            _layer_file(found.seen.widths, layer, rank) for layer in {first, last} for rank in {0, tp - 1}
        ]
        names.sort()
        one = first == last
        findings.append(
            Finding.of(
                codes.MISSING_LAYER,
                f"all files of layer {first:02d} are missing"
                if one
                else f"all files of layers {first:02d} to {last:02d} are missing",
                file=_in(found.folder, _layer_file(found.seen.widths, first, 0)),
                layers=range(first, last + 1),
                expected=why,
                got=got,
                help=f"copy {' and '.join(names) if one and tp < 3 else f'{names[0]} to {names[-1]}'} "
                "from the nodes that ran the pipeline "
                f"{'stage of this layer' if one else 'stages of these layers'}",
            )
        )
    return findings


def _in(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _number(name: str) -> int:
    match = _STEP.match(name)
    return int(match[1]) if match else -1


class GptNeox:
    """The dialect of DeepSpeed checkpoints written by GPT-NeoX: its layer names and arguments."""

    def take(
        self,
        found: Found[ZeroFiles],
        listing: Listing,
        contents: Contents,
        states: list[dict[str, Any]],
        options: Options,
    ) -> tuple[Source, optimizer_state.Naming] | None:
        """Return the declaration and the naming of master weights, if names or arguments are those of
        GPT-NeoX.

        Raises:
            FastshardError: ``FS514`` under ZeRO-3, where no file contains a full shard.
        """
        if not _is_neox(found, contents, states):
            return None
        if found.seen.sliced:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "GPT-NeoX's layers under ZeRO-3 are not supported: no file holds a full shard",
                file=found.files[0].path,
                help="convert this checkpoint with ds_to_universal first; `fastshard merge` reads ZeRO-3 "
                "checkpoints of other models",
            )
        source = self.declare(found, listing, contents, options)
        return source, pipeline_names(found, contents) if found.seen.pipeline else _sequential_name

    def declare(
        self, found: Found[ZeroFiles], listing: Listing, values: Contents, options: Options
    ) -> Source:
        """Declare topology, axes and facts from the rank files' arguments and the saved YAML."""
        states = [as_dict(values(file)) for _, file in found.seen.ranks]
        source = Source(
            framework="GPT-NeoX", step=found.step, files=SourceFiles(ranks=found.seen.list_ranks())
        )
        training = neox_config.read(listing, found.seen.places, options, source.findings)
        args = neox_config.arguments(states)
        _same_run(found, states, source.findings)
        model = neox_config.Model.of(args, training, source.findings)
        source.binding.facts, source.binding.axes = model.facts, dict(model.axes)
        source.index.is_provable = model.layers is not None and model.tp is not None
        keys = ("iteration", "global_steps", "global_samples", "args", "ds_version")
        source.files.values = {k: states[0][k] for k in keys if states and k in states[0]}
        if found.seen.pipeline:
            self._pipeline(found, model, source)
            _rank_files(found, states, source.findings)
        else:
            self._sequential(found, model, source, states)
        features.apply(found, source, model, values, own_layout=options.layout is not None)
        if options.vocab_size:
            source.binding.vocab_size = options.vocab_size
        return source

    def _pipeline(self, found: Found[ZeroFiles], model: neox_config.Model, source: Source) -> None:
        layers = found.seen.layers
        tp = model.tp or _degree(rank for _, rank, _ in layers)
        source.binding.degrees = {"tp": tp}
        have: dict[int, set[int]] = {}
        for layer, rank, file in layers:
            if rank >= tp:
                why = f"tensor-parallel rank {rank} is beyond the {tp} of this checkpoint"
                source.findings.append(unexpected(found.files[file].path, why))
                continue
            have.setdefault(layer, set()).add(rank)
            source.files.units.append(
                Unit(file=file, prefix=f"{layer}.", coords={"tp": rank}, rank=f"tp {rank}")
            )
        count = _blocks(have) if model.layers is None else model.layers
        model.bounded(count, tp)
        expected = [0, *range(2, count + 2), count + 3]
        if source.binding.facts.get("tied") is False:
            expected.append(count + 4)
        elif "tied" not in source.binding.facts:
            source.binding.facts["tied"] = count + 4 not in have
            if not source.binding.facts["tied"]:
                expected.append(count + 4)
        why = f"num_layers {count} and model_parallel_size {tp} in the checkpoint's arguments"
        absent = [layer for layer in expected if layer not in have]
        source.findings += _layers_missing(found, absent, tp, why, f"layers {_listed(expected, have)}")
        for layer in expected:
            if layer in have:
                name = partial(_layer_file, found.seen.widths, layer)
                _missing_ranks(source, found.folder, have[layer], tp, why, name, {"layer": layer})
        wanted = set(expected)
        for layer, _, file in layers:
            if layer not in wanted:
                source.findings.append(
                    Finding.of(
                        codes.UNEXPECTED_FILE,
                        f"layer {layer} of a {count}-layer model",
                        file=found.files[file].path,
                        severity="error",
                        help="move the file away if another run left it here",
                    )
                )

    def _sequential(
        self, found: Found[ZeroFiles], model: neox_config.Model, source: Source, states: list[dict[str, Any]]
    ) -> None:
        ranks = [rank for rank, _ in found.seen.ranks]
        if states and states[0].get("module") is None:
            raise FastshardError.of(
                codes.MISSING_FILE,
                "all layer files are missing",
                file=_in(found.folder, "layer_00-model_00-model_states.pt"),
                evidence=f"{found.files[0].path} holds no tensors: they are in files "
                "layer_LL-model_TT-model_states.pt",
                help="copy the layer files of this step from the nodes that wrote them",
            )
        module = states[0].get("module") if states else None
        tp = model.tp or _degree(ranks)
        model.bounded(model.layers or 1, tp)
        source.binding.degrees = {"tp": tp}
        why = f"model_parallel_size {tp} in the checkpoint's arguments"
        for rank, file in found.seen.ranks:
            if rank >= tp:
                beyond = f"tensor-parallel rank {rank} is beyond the {tp} of this checkpoint"
                source.findings.append(unexpected(found.files[file].path, beyond))
            else:
                source.files.units.append(
                    Unit(
                        file=file,
                        under=["module"],
                        strip="sequential.",
                        coords={"tp": rank},
                        rank=f"tp {rank}",
                    )
                )
        source.files.ranks = {file: {"tp": rank} for rank, file in found.seen.ranks}
        _missing_ranks(source, found.folder, set(ranks), tp, why, _rank_file, {})
        if "tied" not in source.binding.facts and isinstance(module, dict):
            source.binding.facts["tied"] = not any(str(k).endswith(".final_linear.weight") for k in module)


def _layer_file(widths: tuple[int, int], layer: int, rank: int) -> str:
    layer_width, rank_width = widths
    model = f"-model_{rank:0{rank_width}d}" if rank_width else ""
    return f"layer_{layer:0{layer_width}d}{model}-model_states.pt"


def _rank_file(rank: int) -> str:
    return f"mp_rank_{rank:02d}_model_states.pt"


def _degree(ranks: Iterable[int]) -> int:
    """Return the degree that the rank numbers in names imply; impossibly high numbers do not count."""
    return max((rank for rank in ranks if rank < MAX_DEGREE), default=0) + 1


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the first and last number of each run of ascending numbers; short runs are listed one by one."""
    return [
        ends
        for run in runs(numbers)
        for ends in ([(run[0], run[-1])] if len(run) > _ONE_BY_ONE else [(n, n) for n in run])
    ]


def _listed(expected: list[int], have: Container[int]) -> str:
    """Format the existing layers; if there are many, only the first and the last."""
    if len(expected) <= 4 * _ONE_BY_ONE:
        return ",".join(f"{layer:02d}" if layer in have else "_" for layer in expected)
    runs = _runs([layer for layer in expected if layer in have])
    texts = [f"{first:02d}" if first == last else f"{first:02d}-{last:02d}" for first, last in runs]
    return ",".join([*texts[:_ONE_BY_ONE], "..."] if len(texts) > _ONE_BY_ONE else texts)


def _missing_ranks(
    source: Source,
    folder: str,
    have: set[int],
    tp: int,
    why: str,
    file_of: Callable[[int], str],
    layer: Rank,
) -> None:
    """Report missing files of ranks, for one layer or for the checkpoint."""
    for first, last in _runs([rank for rank in range(tp) if rank not in have]):
        names = file_of(first) if last == first else f"{file_of(first)} to {file_of(last)}"
        node = f"copy {names} from the node that ran tp rank {first}"
        source.findings.append(
            missing(
                _in(folder, file_of(first)),
                {"tp": rank_range(first, last), **layer},
                why,
                node if last == first else f"copy {names} from the nodes that ran tp ranks {first} to {last}",
                rank=f"tp {first}" if last == first else f"tp {first} to {last}",
            )
        )


def _rank_files(found: Found[ZeroFiles], states: list[dict[str, Any]], findings: list[Finding]) -> None:
    """Report missing rank files of the pipeline form.

    They contain no tensors, but they are the only files that state a rank's step.
    """
    folder = found.folder
    worlds = [w for s in states if type(w := s.get("mp_world_size")) is int and 0 < w <= 1 << 20]
    if not worlds:
        return
    for first, last in _runs(sorted(set(range(worlds[0])) - {rank for rank, _ in found.seen.ranks})):
        more = "" if first == last else f" to {last}"
        findings.append(
            Finding.of(
                codes.MISSING_FILE,
                "the file is missing: it holds no weights, but without it the step of this rank cannot be "
                "compared",
                severity="warning",
                file=_in(folder, _rank_file(first)),
                rank=f"mp rank {first}{more}",
                evidence=f"mp_world_size {worlds[0]} in the other rank files",
                help=f"copy {_rank_file(first)}{more and f' to {_rank_file(last)}'} from the node that ran "
                f"mp rank {first}{more}",
            )
        )


def _same_run(found: Found[ZeroFiles], states: list[dict[str, Any]], findings: list[Finding]) -> None:
    """Check that the rank files state the same step and the same arguments."""
    findings += same_step(found, states, "mp rank")
    step = _number(found.step or "")
    iteration = states[0].get("iteration") if states else None
    if isinstance(iteration, int) and step >= 0 and iteration != step:
        findings.append(
            Finding.of(
                codes.MIXED_STEPS,
                "the directory's name and its files state different steps",
                file=found.files[0].path,
                expected=str(step),
                got=str(iteration),
                help="copy all files from one step",
            )
        )
    each = [
        (file, neox_config.arguments_of(s)) for (_, file), s in zip(found.seen.ranks, states, strict=True)
    ]
    known = [(file, args) for file, args in each if args is not None]
    keys = ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "model_parallel_size")
    for file, args in known:
        findings += differing(
            codes.RANKS_DISAGREE,
            [(f"args.{key}", known[0][1].get(key), args.get(key)) for key in keys],
            file=found.files[file].path,
            help="copy all files from one run",
        )


def _is_neox(found: Found[ZeroFiles], contents: Contents, states: list[dict[str, Any]]) -> bool:
    """Return True if tensor names or arguments are those of GPT-NeoX."""
    for state in states:
        args = as_dict(state.get("args"))
        args = as_dict(args.get("state")) if "__class__" in args else args
        if "padded_vocab_size" in args or "model_parallel_size" in args:
            return True
        if any(str(name).startswith("sequential.") for name in as_dict(state.get("module"))):
            return True
    return any(
        str(name).startswith(("attention.", "mlp."))
        for _, _, file in found.seen.layers
        for name in as_dict(contents(file))
    )


def _sequential_name(name: str) -> str:
    return name.removeprefix("sequential.")
