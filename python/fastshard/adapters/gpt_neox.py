"""GPT-NeoX checkpoints: names, arguments and configs in DeepSpeed's files, pipeline and sequential form.

source: gpt-neox megatron/checkpointing.py, DeepSpeed runtime/engine.py and pipe/module.py
"""

from __future__ import annotations

import re
from typing import Any

from ..discover import Listing
from ..errors import FastshardError, Finding
from . import neox_config, neox_features
from .base import Contents, Found, Options, Source, Unit, missing

_STEP = re.compile(r"^(?:global_step)?(\d+)$")


def _in(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _number(name: str) -> int:
    match = _STEP.match(name)
    return int(match[1]) if match else -1


class GptNeox:
    """The dialect of DeepSpeed checkpoints that GPT-NeoX writes: its layer names and arguments."""

    def declare(self, found: Found, listing: Listing, values: Contents, options: Options) -> Source:
        """Topology, axes and facts from the rank files' arguments and the saved YAML."""
        notes = found.notes
        ranks: list[int] = notes["ranks"]
        states: list[dict[str, Any]] = []
        for i in range(len(ranks)):
            content = values(i)
            states.append(content if isinstance(content, dict) else {})
        source = Source(framework=found.framework, units=[], step=found.step)
        yaml, yaml_path = neox_config.read(listing, notes["places"], options, source.findings)
        args = neox_config.arguments(states)
        _same_run(found, states, source.findings)
        model = neox_config.Model.of(args, yaml, yaml_path, source.findings)
        source.config = model.to_dict()
        source.facts, source.axes = model.facts, dict(model.axes)
        source.provable = model.layers is not None and model.tp is not None
        keys = ("iteration", "global_steps", "global_samples", "args", "ds_version")
        source.values = {k: states[0][k] for k in keys if states and k in states[0]}
        if notes["pipeline"]:
            self._pipeline(found, model, source)
            _rank_files(found, states, source.findings)
        else:
            self._sequential(found, model, source, states)
        neox_features.apply(found, source, model, values)
        if options.vocab_size:
            source.vocab_size = options.vocab_size
        return source

    def _pipeline(self, found: Found, model: neox_config.Model, source: Source) -> None:
        notes = found.notes
        layers: list[tuple[int, int]] = notes["layers"]
        offset = len(notes["ranks"])
        tp = model.tp or max(t for _, t in layers) + 1
        source.degrees = {"tp": tp}
        have = set(layers)
        for i, (layer, rank) in enumerate(layers):
            file = found.files[offset + i]
            if rank >= tp:
                source.findings.append(
                    Finding.of(
                        "FS108", f"tp rank {rank} of a tp {tp} checkpoint: a leftover?", file=file.path
                    )
                )
                continue
            source.units.append(
                Unit(file=offset + i, prefix=f"{layer}.", coords={"tp": rank}, rank=f"tp {rank}")
            )
        count = model.layers
        if count is None:
            # Gaps at 1 and N+2 are normal: no tensors live there.
            blocks = sorted({layer for layer, _ in layers})
            count = max((b for b in blocks if b >= 2), default=1) - 1
            norm = [b for b in blocks if b + 1 not in blocks and b - 1 not in blocks and b > 2]
            count = norm[0] - 3 if norm else count
        expected = [0, *range(2, count + 2), count + 3]
        if source.facts.get("tied") is False:
            expected.append(count + 4)
        elif "tied" not in source.facts:
            source.facts["tied"] = not any(layer == count + 4 for layer, _ in layers)
            if not source.facts["tied"]:
                expected.append(count + 4)
        why = f"num_layers {count} and model_parallel_size {tp} in the checkpoint's arguments"
        absent = [layer for layer in expected if not any((layer, rank) in have for rank in range(tp))]
        for layer in absent:
            shown = ",".join(f"{x:02d}" if x not in absent else "_" for x in expected)
            names = " and ".join(self._file(notes, layer, rank) for rank in range(tp))
            source.findings.append(
                Finding.of(
                    "FS103",
                    f"layer {layer:02d}: none of its files is there",
                    file=_in(notes["folder"], self._file(notes, layer, 0)),
                    expected=why,
                    got=f"layers {shown}",
                    help=f"copy {names} from the pipeline stage that owned the layer",
                )
            )
        for layer in expected:
            for rank in range(tp):
                if (layer, rank) not in have and layer not in absent:
                    name = self._file(notes, layer, rank)
                    source.findings.append(
                        missing(
                            _in(notes["folder"], name),
                            f"tp {rank}",
                            why,
                            f"copy {name} from the node that ran tp rank {rank}",
                        )
                    )
        for i, (layer, _) in enumerate(layers):
            if layer not in expected:
                source.findings.append(
                    Finding.of(
                        "FS108",
                        f"layer {layer} of a {count}-layer model",
                        file=found.files[offset + i].path,
                        severity="error",
                        help="a leftover of another run in the same folder? move it away",
                    )
                )

    @staticmethod
    def _file(notes: dict[str, Any], layer: int, rank: int) -> str:
        layer_width, rank_width = notes["widths"]
        model = f"-model_{rank:0{rank_width}d}" if rank_width else ""
        return f"layer_{layer:0{layer_width}d}{model}-model_states.pt"

    def _sequential(
        self, found: Found, model: neox_config.Model, source: Source, states: list[dict[str, Any]]
    ) -> None:
        ranks: list[int] = found.notes["ranks"]
        if states and states[0].get("module") is None:
            raise FastshardError.of(
                "FS101",
                "the rank files hold no tensors, and no layer file is there",
                file=found.files[0].path,
                expected="layer_LL-model_TT-model_states.pt beside it",
                got="none",
                help="copy the layer files of this step from the nodes that wrote them",
            )
        module = states[0].get("module") if states else None
        tp = model.tp or max(ranks) + 1
        source.degrees = {"tp": tp}
        why = f"model_parallel_size {tp} in the checkpoint's arguments"
        for i, rank in enumerate(ranks):
            if rank >= tp:
                source.findings.append(
                    Finding.of(
                        "FS108", f"rank {rank} of a tp {tp} checkpoint: a leftover?", file=found.files[i].path
                    )
                )
            else:
                source.units.append(
                    Unit(
                        file=i, under=["module"], strip="sequential.", coords={"tp": rank}, rank=f"tp {rank}"
                    )
                )
        for rank in range(tp):
            if rank not in ranks:
                name = f"mp_rank_{rank:02d}_model_states.pt"
                source.findings.append(
                    missing(
                        _in(found.notes["folder"], name),
                        f"tp {rank}",
                        why,
                        f"copy {name} from the node that ran tp rank {rank}",
                    )
                )
        if "tied" not in source.facts and isinstance(module, dict):
            source.facts["tied"] = not any(str(k).endswith(".final_linear.weight") for k in module)


def _rank_files(found: Found, states: list[dict[str, Any]], findings: list[Finding]) -> None:
    """Rank files of the pipeline form hold no tensors: without one, its rank's step is not known."""
    ranks, folder = found.notes["ranks"], found.notes["folder"]
    worlds = [w for s in states if isinstance(w := s.get("mp_world_size"), int) and 0 < w <= 1 << 20]
    if not worlds:
        return
    for rank in sorted(set(range(worlds[0])) - set(ranks)):
        name = f"mp_rank_{rank:02d}_model_states.pt"
        findings.append(
            Finding.of(
                "FS101",
                "missing file: it holds no weights, but what step this rank's files are of cannot be compared",
                severity="warning",
                file=_in(folder, name),
                rank=f"mp rank {rank}",
                expected=f"mp_world_size {worlds[0]} in the other rank files",
                got="no such file",
                help=f"copy {name} from the node that ran mp rank {rank}",
            )
        )


def _same_run(found: Found, states: list[dict[str, Any]], findings: list[Finding]) -> None:
    """The rank files must tell of one step and one set of arguments."""
    for key in ("iteration", "global_steps"):
        seen = [(i, s[key]) for i, s in enumerate(states) if key in s]
        for i, value in seen:
            if value != seen[0][1]:
                findings.append(
                    Finding.of(
                        "FS107",
                        f"{key} differs between ranks",
                        file=found.files[i].path,
                        rank=f"mp rank {found.notes['ranks'][i]}",
                        expected=f"{seen[0][1]} as in {found.files[seen[0][0]].name}",
                        got=str(value),
                        help="take all files from one step",
                    )
                )
    step = _number(found.step or "")
    iteration = states[0].get("iteration") if states else None
    if isinstance(iteration, int) and step >= 0 and iteration != step:
        findings.append(
            Finding.of(
                "FS107",
                "the folder is named for another step than its files tell of",
                file=found.files[0].path,
                expected=str(step),
                got=str(iteration),
                help="take all files from one step",
            )
        )
    each = [(i, neox_config.arguments_of(s)) for i, s in enumerate(states)]
    known = [(i, args) for i, args in each if args is not None]
    for i, args in known:
        for key in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "padded_vocab_size",
            "model_parallel_size",
        ):
            if args.get(key) != known[0][1].get(key):
                findings.append(
                    Finding.of(
                        "FS110",
                        f"args.{key} differs between ranks",
                        file=found.files[i].path,
                        expected=str(known[0][1].get(key)),
                        got=str(args.get(key)),
                        help="the files belong to different runs",
                    )
                )
