"""Which rank a rank file is of, by the arguments and the tensors that it holds.

The tensor-parallel rank is the fastest of all in every order of ranks that Megatron-LM uses: tp-cp-ep-dp-pp, tp-cp-ep-pp-dp, and
tp-pp-dp before these. So ``args.rank % tensor_model_parallel_size`` is the tp of ``mp_rank_TP``, whatever the other degrees are.
source: megatron/core/parallel_state.py (RankGenerator), megatron/training/checkpointing.py (get_checkpoint_name)

The first pipeline stage holds the embedding, the last one the final norm.
source: megatron/core/models/gpt/gpt_model.py (pre_process), transformer/transformer_block.py (post_layer_norm)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from ...common.errors import Finding
from ...layouts.declaration import Source
from ..base import Found

#: (tp, pp, ep) of a file by its name.
_Place = tuple[int, int, int]
_EMBEDDING = "embedding.word_embeddings.weight"
_FINAL_NORM = re.compile(r"(decoder|encoder)\.final_(layer)?norm\.weight")
#: Tensors of multi-token prediction, whose stage embeds tokens too.
_MTP = "mtp."


def judge(
    source: Source,
    found: Found[object],
    files: Sequence[tuple[int, _Place, dict[str, Any]]],
    tp: int,
    pp: int,
) -> None:
    """Puts on a declaration which files are in the place of their rank, and an error for each that is in another's.

    Args:
        source: the declaration.
        found: the files.
        files: number, place by its name, and arguments of each.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
    """
    told = [(at, place[:2], rank, args) for at, place, args in files if (rank := _rank(args)) is not None]
    if len(told) < len(files) or (len(files) > 1 and len({rank for _, _, rank, _ in told}) == 1):
        # Converters write no rank, or 0 into all files.
        return
    by_order = [
        [(at, place, rank, (rank % tp, stage(rank, args, tp, pp))) for at, place, rank, args in told]
        for stage in (_stage_last, _stage_before_data)
    ]
    # All files are of one order: the one that gives each a place of its own, and contradicts the names least.
    wrong = min(
        by_order,
        key=lambda of: (len(of) - len({own for *_, own in of}), sum(place != own for _, place, _, own in of)),
    )
    wrong = [one for one in wrong if one[1] != one[3]]
    paths = {place: found.files[at].path for at, place, _, _ in told}
    for at, place, rank, own in wrong:
        right = f"rename the files back, or copy them again; its place is that of {paths[own]}"
        source.findings.append(
            Finding.of(
                "FS113",
                "the file is another rank's, by its arguments",
                file=found.files[at].path,
                rank=_called(place, pp),
                expected=_called(place, pp),
                got=_called(own, pp),
                evidence=f"args.rank {rank} in the file",
                help=right if own in paths else "copy the file of this rank from the node that ran it",
            )
        )
    source.placed |= {at for at, *_ in told} - {at for at, *_ in wrong}


def judge_stages(
    source: Source, found: Found[object], files: Sequence[tuple[int, _Place, Collection[str]]], pp: int
) -> None:
    """Puts on a declaration an error for each file that is in the place of another pipeline stage, by the tensors in it.

    What stages between the first and the last hold does not tell them apart.

    Args:
        source: the declaration.
        found: the files.
        files: number, place by its name, and names of the tensors of each.
        pp: pipeline-parallel degree.
    """
    told = {file for finding in source.findings for file in finding.files}
    norms = {name for *_, names in files for name in names if _FINAL_NORM.fullmatch(name)}
    # An encoder's is in the last stage where there is no decoder.
    last_name = max(norms, key=lambda name: name.startswith("decoder"), default="")
    columns: dict[tuple[int, int], list[tuple[int, int, Collection[str]]]] = {}
    for at, (tp, stage, ep), names in files if pp > 1 else ():
        columns.setdefault((tp, ep), []).append((at, stage, names))
    for (tp, _), column in columns.items():
        for end, name in ((0, _EMBEDDING), (pp - 1, last_name)):
            holders = {at for at, _, names in column if name in names}
            for at, stage, names in column if holders else ():
                path = found.files[at].path
                is_else = name == _EMBEDDING and (
                    last_name in names or any(n.startswith(_MTP) for n in names)
                )
                if path in told or (stage == end) == (at in holders) or (stage != end and is_else):
                    continue
                told.add(path)
                own = _own_stage(names, last_name, pp) if stage == end else end
                source.findings.append(
                    Finding.of(
                        "FS113",
                        "the file is another pipeline stage's, by its tensors",
                        file=path,
                        rank=_called((tp, stage), pp),
                        expected=_called((tp, stage), pp),
                        got=f"tp {tp}, another stage" if own is None else _called((tp, own), pp),
                        evidence=f"{name} is in it" if at in holders else f"{name} is not in it",
                        help="rename the files back, or copy the files of these stages again from the nodes that ran them",
                    )
                )


def _own_stage(names: Collection[str], last_name: str, pp: int) -> int | None:
    """The stage that a file is of, by its tensors; None where they do not tell."""
    if last_name in names:
        return pp - 1
    return 0 if _EMBEDDING in names else None


def _rank(args: dict[str, Any]) -> int | None:
    """``args.rank``, where it tells of a place."""
    rank, world = args.get("rank"), args.get("world_size")
    encoder = args.get("encoder_tensor_model_parallel_size")
    if type(rank) is not int or type(world) is not int or (type(encoder) is int and encoder > 0):
        return None
    return rank if 0 <= rank < world else None


def _stage_last(rank: int, args: dict[str, Any], tp: int, pp: int) -> int:
    """Pipeline stage in the order tp-cp-ep-dp-pp."""
    return int(rank // max(args["world_size"] // pp, 1))


def _stage_before_data(rank: int, args: dict[str, Any], tp: int, pp: int) -> int:
    """Pipeline stage in the order tp-cp-pp-dp."""
    cp = args.get("context_parallel_size")
    return rank // (tp * (cp if type(cp) is int and cp > 0 else 1)) % pp


def _called(place: tuple[int, ...], pp: int) -> str:
    return f"tp {place[0]}" + (f", pp {place[1]}" if pp > 1 else "")
