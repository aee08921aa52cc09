"""Missing shards of ColossalAI's saves, according to names and indexes, and shards that no index names."""

from __future__ import annotations

from ...common import codes
from ...common.errors import Finding
from ...common.listing import File
from ...common.ranks import format_rank
from ...common.regex import compile_when_used
from ..base import Options, lacking, missing, unexpected
from .index import PARTIAL, coords_of, join

#: Names of a model's shards.
SHARD = compile_when_used(
    r"^(?:model|pytorch_model)(?:\.[^.]+)?(?:-stage-(?P<stage>\d{5})(?:-(?P<ep>\d{5}))?-shard)?-\d{5}"
    r"\.(?P<kind>safetensors|bin)$"
)


def writer(name: str) -> tuple[int, int] | None:
    """Parse the pipeline stage and the expert-parallel rank (0: none) in a shard's name.

    None for an unsharded save.
    """
    match = SHARD.match(name)
    return (int(match["stage"]), int(match["ep"] or 0)) if match and match["stage"] else None


def not_named(file: File) -> Finding:
    """Report that the index does not name a file.

    For expert-parallel ranks, the index names only one of the copies.
    """
    match = SHARD.match(file.name)
    if match and match["ep"]:
        what = "the index does not name this file, which holds copies of another expert-parallel rank's data"
        return Finding.of(codes.UNEXPECTED_FILE, what, severity="note", file=file.path)
    return unexpected(file.path, "the index does not name this file")


def stage_not_merged(folder: str, whole: list[str]) -> Finding:
    """Report that the index names none of a stage's files."""
    return Finding.of(
        codes.UNEXPECTED_FILE,
        f"the index lacks a pipeline stage whose {len(whole)} files exist: they are read by their names",
        file=join(folder, whole[0]),
        severity="warning",
        help="check that the files of all stages are here; ColossalAI merges only the stages' indexes on "
        "rank 0's disk",
    )


def shard_missing(folder: str, name: str) -> Finding:
    """Report a shard that the index names and no directory contains."""
    coords = coords_of(SHARD.match(name))
    where = f"from the node that ran {format_rank(coords)}" if coords else "from the original checkpoint"
    help = f"copy it {where}, or name that node's directory as another CKPT"
    return missing(join(folder, name), coords, "named in the index", help)


def writers_missing(folder: str, stem: str, kind: str, written: set[tuple[int, int]]) -> list[Finding]:
    """Report stages, and expert-parallel ranks of a stage, without files, based on the existing numbers."""
    stages = {stage for stage, _ in written}
    experts = max((ep for _, ep in written), default=0)
    findings = []
    for stage, last in lacking(stages, 1, max(stages, default=0) - 1):
        why = f"stages 1 to {max(stages)}, by the files" + (f"; {stage} to {last}" if last > stage else "")
        findings.append(stage_missing(folder, stem, stage, kind, why, 1 if experts else 0))
    for stage in sorted(stages):
        for ep, last in lacking((e for s, e in written if s == stage), 1, experts) if experts else ():
            why = f"expert-parallel ranks 1 to {experts}, by the files"
            why += f"; {ep} to {last}" if last > ep else ""
            findings.append(stage_missing(folder, stem, stage, kind, why, ep))
    return findings


def unfinished(folder: str, partial: list[File], options: Options) -> Finding:
    """Report that there is no merged index."""
    accepted = "uncommitted" in options.accept
    taken = f"the indexes of {len(partial)} stages in {PARTIAL}/ are" if partial else "no index is"
    return Finding.of(
        codes.UNCOMMITTED,
        "the merged index, which is written last, is missing: the save did not finish, or this is the disk "
        "of one node",
        file=join(folder, PARTIAL) if partial else folder or ".",
        severity="warning" if accepted else None,
        decided="accept uncommitted" if accepted else None,
        expected="model.safetensors.index.json or pytorch_model.bin.index.json",
        got=f"{taken} present",
        help="name the directory of the node that ran rank 0 as another CKPT; --accept uncommitted uses the "
        "files here, and a config.json (--config) shows whether they are complete",
    )


def stage_missing(folder: str, stem: str, stage: int, kind: str, why: str, ep: int = 0) -> Finding:
    """Report that the first file of a stage, or of an expert-parallel rank in it, is missing."""
    name = f"{stem}-stage-{stage:05d}{f'-{ep:05d}' if ep else ''}-shard-00001.{kind}"
    ran = f"pipeline stage {stage - 1}" + (f", expert-parallel rank {ep - 1}" if ep else "")
    return missing(
        join(folder, name),
        coords_of(SHARD.match(name)),
        why,
        f"copy the files of stage {stage}{f', rank {ep}' if ep else ''} from the node that ran {ran} "
        "(counted from 0), or name"
        " that node's directory as another CKPT",
    )
