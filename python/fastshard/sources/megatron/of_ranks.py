"""The rank to which a rank file belongs, according to its arguments and tensors.

The tensor-parallel rank varies fastest in every rank order that Megatron-LM uses: tp-cp-ep-dp-pp,
tp-cp-ep-pp-dp, and tp-pp-dp in older versions. Therefore ``args.rank % tensor_model_parallel_size`` is the tp
of ``mp_rank_TP``, whatever the other degrees are.
source: megatron/core/parallel_state.py (RankGenerator), megatron/training/checkpointing.py
    (get_checkpoint_name)

The first pipeline stage has the embedding. Other stages may have it too (the last one, one with multi-token
prediction, a decoder's first one). The final norm is after all layers: in the last stage, or with the last
layer if multi-token prediction is in a separate stage after it.
source: megatron/core/models/gpt/gpt_model.py (pre_process), transformer/transformer_block.py
    (has_final_layernorm_in_this_stage)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ...common import codes
from ...common.errors import Finding
from ...common.regex import compile_when_used
from ...layouts.declaration import Source
from ..base import Found

#: (tp, pp, ep) of a file, according to its name.
_Place = tuple[int, int, int]
_EMBEDDING = "embedding.word_embeddings.weight"
_FINAL_NORM = compile_when_used(r"(decoder|encoder)\.final_(layer)?norm\.weight")
#: Tensors of multi-token prediction, whose stage also embeds tokens.
_MTP = "mtp."
#: Stage, number in :attr:`Found.files`, and tensor names of each model chunk.
_Stage = tuple[int, int, Sequence[Collection[str]]]


def judge(
    source: Source,
    found: Found[object],
    files: Sequence[tuple[int, _Place, dict[str, Any]]],
    tp: int,
    pp: int,
) -> None:
    """Declare which files are in their own rank's place, and report each file in another rank's place.

    Args:
        source: the declaration.
        found: the files.
        files: number, place in the name, and arguments of each file.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
    """
    files_with_rank = [
        (at, place[:2], rank, args) for at, place, args in files if (rank := _rank(args)) is not None
    ]
    if len(files_with_rank) < len(files) or (
        len(files) > 1 and len({rank for _, _, rank, _ in files_with_rank}) == 1
    ):
        # Converters write no rank, or 0 into all files.
        return
    by_order = [
        [
            (at, place, rank, (rank % tp, stage(rank, args, tp, pp)))
            for at, place, rank, args in files_with_rank
        ]
        for stage in (_stage_last, _stage_before_data)
    ]
    # All files are of one order: the one that gives each a place of its own, and contradicts the names least.
    wrong = min(
        by_order,
        key=lambda of: (len(of) - len({own for *_, own in of}), sum(place != own for _, place, _, own in of)),
    )
    wrong = [one for one in wrong if one[1] != one[3]]
    paths = {place: found.files[at].path for at, place, _, _ in files_with_rank}
    for at, place, rank, own in wrong:
        right = f"rename the files back, or copy them again; it belongs at {paths[own]}"
        source.findings.append(
            Finding.of(
                codes.RENAMED,
                "according to its arguments, the file is from another rank",
                file=found.files[at].path,
                rank=_called(place, pp),
                expected=_called(place, pp),
                got=_called(own, pp),
                evidence=f"args.rank is {rank} in the file",
                help=right if own in paths else "copy the file of this rank from the node that ran it",
            )
        )
    source.files.placed |= {at for at, *_ in files_with_rank} - {at for at, *_ in wrong}


def judge_stages(
    source: Source,
    found: Found[object],
    files: Sequence[tuple[int, _Place, Sequence[Collection[str]]]],
    pp: int,
) -> None:
    """Report each file that is in another pipeline stage's place, according to its tensors.

    The tensors of the stages between the first and the last do not distinguish these stages.

    Args:
        source: the declaration.
        found: the files.
        files: number, place in the name, and tensor names of each model chunk, for each file.
        pp: pipeline-parallel degree.
    """
    files_with_findings = {file for finding in source.findings for file in finding.files}
    columns: dict[tuple[int, int], list[_Stage]] = {}
    for at, (tp, stage, ep), chunks in files if pp > 1 else ():
        columns.setdefault((tp, ep), []).append((stage, at, chunks))
    for (tp, _), column in columns.items():
        norm = _final_norm(column)
        wrong = [(of, _EMBEDDING) for of in _embedding_elsewhere(sorted(column), norm)]
        if not any(_holds(of[2], norm) for of, _ in wrong):
            wrong += [(of, norm) for of in _norm_before_layers(column, norm)]
        for (stage, at, chunks), name in wrong:
            path = found.files[at].path
            if path in files_with_findings:
                continue
            files_with_findings.add(path)
            own = _own_stage(chunks, norm, pp)
            source.findings.append(
                Finding.of(
                    codes.RENAMED,
                    "according to its tensors, the file is from another pipeline stage",
                    file=path,
                    rank=_called((tp, stage), pp),
                    expected=_called((tp, stage), pp),
                    got=f"tp {tp}, another stage" if own is None else _called((tp, own), pp),
                    evidence=f"the file holds {name}"
                    if _holds(chunks, name)
                    else f"the file does not hold {name}",
                    help="rename the files back, or copy the files of these stages again from the nodes that "
                    "ran them",
                )
            )


def _final_norm(column: Sequence[_Stage]) -> str:
    """Return the name of the norm after all layers: the encoder's if there is no decoder; empty if there is
    none.
    """
    names = {name for *_, chunks in column for chunk in chunks for name in chunk}
    norms = [name for name in names if _FINAL_NORM.fullmatch(name)]
    return max(norms, key=lambda name: name.startswith("decoder"), default="")


def _embedding_elsewhere(column: Sequence[_Stage], norm: str) -> list[_Stage]:
    """Return the file in the first stage's place, and the file with the embedding that the former lacks."""
    first = column[0]
    holders = [of for of in column if _holds(of[2], _EMBEDDING)]
    if first[0] != 0 or not holders or first in holders:
        return []
    alone = [
        of
        for of in holders
        if not (norm and _holds(of[2], norm))
        and not any(n.startswith(_MTP) for chunk in of[2] for n in chunk)
    ]
    return [first, *alone[:1]]


def _norm_before_layers(column: Sequence[_Stage], norm: str) -> list[_Stage]:
    """Return the file with the final norm and the file with the layers after it, if there are such files.

    Virtual stages are in order.
    """
    layers = f"{norm.partition('.')[0]}.layers."
    places = [(chunk, of) for of in column for chunk, _ in enumerate(of[2])]
    holding = [(chunk, of[0], of) for chunk, of in places if norm and norm in of[2][chunk]]
    layered = [
        (chunk, of[0], of) for chunk, of in places if any(name.startswith(layers) for name in of[2][chunk])
    ]
    if not holding or not layered:
        return []
    norm_stage, last = max(holding, key=lambda one: one[:2]), max(layered, key=lambda one: one[:2])
    return [norm_stage[2], last[2]] if norm_stage[:2] < last[:2] and norm_stage[1] != last[1] else []


def _holds(chunks: Sequence[Collection[str]], name: str) -> bool:
    return any(name in chunk for chunk in chunks)


def _own_stage(chunks: Sequence[Collection[str]], norm: str, pp: int) -> int | None:
    """Return the stage to which a file belongs, according to its tensors; None if they do not show it."""
    if norm and _holds(chunks, norm):
        return pp - 1
    return 0 if _holds(chunks, _EMBEDDING) else None


def _rank(args: dict[str, Any]) -> int | None:
    """Return ``args.rank``, if it determines a place."""
    rank, world = args.get("rank"), args.get("world_size")
    encoder = args.get("encoder_tensor_model_parallel_size")
    if type(rank) is not int or type(world) is not int or (type(encoder) is int and encoder > 0):
        return None
    return rank if 0 <= rank < world else None


def _stage_last(rank: int, args: dict[str, Any], tp: int, pp: int) -> int:
    """Return the pipeline stage in the rank order tp-cp-ep-dp-pp."""
    return int(rank // max(args["world_size"] // pp, 1))


def _stage_before_data(rank: int, args: dict[str, Any], tp: int, pp: int) -> int:
    """Return the pipeline stage in the rank order tp-cp-pp-dp."""
    cp = args.get("context_parallel_size")
    return rank // (tp * (cp if type(cp) is int and cp > 0 else 1)) % pp


def _called(place: tuple[int, ...], pp: int) -> str:
    return f"tp {place[0]}" + (f", pp {place[1]}" if pp > 1 else "")
