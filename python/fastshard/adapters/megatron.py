"""Megatron-LM checkpoints of the legacy form: ``iter_NNNNNNN/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``.

Layers are numbered from the first of their pipeline stage (and of their virtual stage).
source: Megatron-LM megatron/training/checkpointing.py
"""

from __future__ import annotations

import re
from typing import Any

from ..discover import File, Listing
from ..errors import FastshardError, Finding
from . import megatron_config
from .base import Contents, Found, Options, Source, Unit, missing

_RANK = re.compile(r"^(?:(.*)/)?mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/(?:model_optim_rng|model_rng)\.pt$")
_TRACKER = "latest_checkpointed_iteration.txt"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_MODEL = re.compile(r"^model(\d*)$")


def _number(step: str) -> int:
    digits = step.removeprefix("iter_")
    return int(digits) if digits.isdigit() else -1


class Megatron:
    """Directories with one folder per model-parallel rank."""

    name = "megatron"

    def detect(self, listing: Listing, options: Options) -> Found | None:
        """Looks for rank folders; the tracker file chooses among steps."""
        if listing.single:
            return None
        matched = [(f, m) for f in listing.files if (m := _RANK.match(f.path))]
        if not matched:
            return None
        steps: dict[str, list[tuple[File, re.Match[str]]]] = {}
        for file, match in matched:
            folder = match[1] or ""
            step = folder.rpartition("/")[2] or listing.roots[file.root].resolve().name
            steps.setdefault(step, []).append((file, match))
        step = self._step(listing, list(steps), options)
        chosen = sorted(
            steps[step], key=lambda t: (int(t[1][2]), int(t[1][3] or 0), int(t[1][4] or 0), t[0].root)
        )
        if any(m[4] for _, m in chosen):
            raise FastshardError.of(
                "FS514",
                "a Megatron-LM checkpoint with expert-parallel ranks: not read",
                file=chosen[0][0].path,
            )
        notes = {
            "folder": chosen[0][1][1] or "",
            "ranks": [(int(m[2]), int(m[3] or 0)) for _, m in chosen],
            "widths": (len(chosen[0][1][2]), len(chosen[0][1][3] or "")),
        }
        return Found(self, "Megatron-LM", [f for f, _ in chosen], step=step, notes=notes)

    @staticmethod
    def _step(listing: Listing, steps: list[str], options: Options) -> str:
        have = ", ".join(sorted(steps, key=lambda s: (_number(s), s)))
        if options.step is not None:
            for step in steps:
                if step == options.step or (options.step.isdigit() and _number(step) == int(options.step)):
                    return step
            raise FastshardError.of(
                "FS501",
                f"there is no step {options.step}",
                expected=f"one of {have}",
                help="choose one of these with --step",
            )
        for tracker in (f for f in listing.files if f.name == _TRACKER):
            named = listing.read_text(tracker, limit=4096).strip()
            for step in steps:
                if step == named or (named.isdigit() and _number(step) == int(named)):
                    return step
            raise FastshardError.of(
                "FS105",
                "the tracker file names a step that is not there",
                file=tracker.path,
                expected=f"one of {have}",
                got=repr(named),
                help=f"copy step {named} from where it was saved, or choose one that is there with --step",
            )
        return max(steps, key=lambda s: (_number(s), s))

    def declare(self, found: Found, listing: Listing, contents: Contents, options: Options) -> Source:
        """Topology from the arguments; the first layer of each stage from the layers before it."""
        ranks: list[tuple[int, int]] = found.notes["ranks"]
        states = [contents(i) for i in range(len(ranks))]
        source = Source(found.framework, units=[], layout="megatron.legacy", step=found.step)
        source.vocab_size = options.vocab_size
        args = next((a for s in states if (a := megatron_config.arguments(s))), {})
        tp = megatron_config.number(args, "tensor_model_parallel_size") or max(t for t, _ in ranks) + 1
        pp = megatron_config.number(args, "pipeline_model_parallel_size") or max(p for _, p in ranks) + 1
        if (megatron_config.number(args, "expert_model_parallel_size") or 1) > 1 or args.get("num_experts"):
            raise FastshardError.of(
                "FS514", "a mixture-of-experts checkpoint of Megatron-LM: not read", file=found.files[0].path
            )
        source.degrees = {"tp": tp}
        source.provable = bool(args)
        source.values = {"iteration": args.get("iteration"), "args": args} if args else {}
        self._ranks(found, states, tp, pp, source)
        models = [self._models(s) for s in states]
        names = {name for model in models for _, names in model for name in names}
        self._units(ranks, models, tp, source)
        megatron_config.describe(source, args, names)
        if args.get("use_distributed_optimizer"):
            source.findings.append(
                Finding.of(
                    "FS108",
                    "the distributed optimizer keeps its state in files of its own, which were not read",
                    severity="note",
                    file=found.notes["folder"] or None,
                )
            )
        return source

    @staticmethod
    def _models(state: Any) -> list[tuple[str, list[str]]]:
        """(key, tensor names) of each model chunk: ``model``, or ``model0``, ``model1``, ... of virtual stages."""
        if not isinstance(state, dict):
            return []
        found = [(key, m) for key in state if (m := _MODEL.match(str(key))) and isinstance(state[key], dict)]
        found.sort(key=lambda t: int(t[1][1] or 0))
        return [(key, [str(name) for name in state[key]]) for key, _ in found]

    @staticmethod
    def _units(
        ranks: list[tuple[int, int]], models: list[list[tuple[str, list[str]]]], tp: int, source: Source
    ) -> None:
        """Units with the number of the first layer: virtual stage by virtual stage, stage by stage."""
        counts: dict[tuple[int, int], int] = {}
        for (_, stage), model in zip(ranks, models, strict=True):
            for chunk, (_, names) in enumerate(model):
                layers = [int(m[1]) + 1 for name in names if (m := _LAYER.match(name))]
                counts[chunk, stage] = max(counts.get((chunk, stage), 0), max(layers, default=0))
        bases, at = {}, 0
        for place in sorted(counts):
            bases[place] = at
            at += counts[place]
        for i, ((rank, stage), model) in enumerate(zip(ranks, models, strict=True)):
            for chunk, (key, _) in enumerate(model):
                if rank < tp:
                    source.units.append(
                        Unit(
                            file=i,
                            under=[key],
                            coords={"tp": rank, "pp": stage},
                            bases={"L": bases[chunk, stage]},
                            rank=f"tp {rank}, pp {stage}",
                        )
                    )

    @staticmethod
    def _ranks(found: Found, states: list[Any], tp: int, pp: int, source: Source) -> None:
        """All ranks must be there, of one iteration and one set of arguments."""
        ranks, folder = found.notes["ranks"], found.notes["folder"]
        wide_tp, wide_pp = found.notes["widths"]
        for rank in range(tp):
            for stage in range(pp):
                if (rank, stage) not in ranks:
                    suffix = f"_{stage:0{wide_pp or 3}d}" if pp > 1 else ""
                    name = f"mp_rank_{rank:0{wide_tp}d}{suffix}"
                    source.findings.append(
                        missing(
                            f"{folder}/{name}/model_optim_rng.pt" if folder else f"{name}/model_optim_rng.pt",
                            f"tp {rank}, pp {stage}",
                            f"tensor_model_parallel_size {tp} x pipeline_model_parallel_size {pp} in the arguments",
                            f"copy {name} from the node that ran tp rank {rank}, pp rank {stage}",
                        )
                    )
        known = [(i, megatron_config.arguments(s)) for i, s in enumerate(states) if isinstance(s, dict)]
        for i, args in known:
            if ranks[i][0] >= tp or ranks[i][1] >= pp:
                source.findings.append(
                    Finding.of(
                        "FS108",
                        f"tp rank {ranks[i][0]}, pp rank {ranks[i][1]} of a {tp} x {pp} checkpoint: a leftover?",
                        file=found.files[i].path,
                    )
                )
            first = known[0][1]
            for key in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size",
                        "tensor_model_parallel_size", "pipeline_model_parallel_size"):  # fmt: skip
                if args.get(key) != first.get(key):
                    source.findings.append(
                        Finding.of(
                            "FS110",
                            f"args.{key} differs between ranks",
                            file=found.files[i].path,
                            expected=str(first.get(key)),
                            got=str(args.get(key)),
                            help="the files belong to different runs",
                        )
                    )
            steps = (states[known[0][0]].get("iteration"), states[i].get("iteration"))
            if steps[0] != steps[1]:
                source.findings.append(
                    Finding.of(
                        "FS107",
                        "iteration differs between ranks",
                        file=found.files[i].path,
                        rank=f"tp {ranks[i][0]}, pp {ranks[i][1]}",
                        expected=str(steps[0]),
                        got=str(steps[1]),
                        help="take all files from one step",
                    )
                )
