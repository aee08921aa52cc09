"""Files that have another rank's name than the one under which they were saved.

torch.save uses the file's name without its extension as the folder name inside the archive.
source: torch/serialization.py (_open_zipfile_writer_file, PyTorchStreamWriter)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from .. import _core
from ..common import codes, safe_files
from ..common.errors import Finding
from ..common.regex import compile_when_used

#: The numbered words in file names of DeepSpeed, GPT-NeoX, Megatron-LM, ColossalAI and FSDP.
_NUMBERED = compile_when_used(
    r"(zero_pp_rank|mp_rank|tp_rank|pp_rank|dp_rank|ep_rank|expp_rank|rank|layer|model"
    r"|stage|shard|expert)[_-]?(\d{1,18})"
)
#: Words that number parts, not places, unless they occur with another word.
_PARTS = ("model", "shard")


def places(name: str) -> dict[str, int]:
    """Parse the place in a file's name: word -> number."""
    found = {word: int(number) for word, number in _NUMBERED.findall(name)}
    # `model-00001-of-00002` counts files, of which an index says what is in them.
    return found if any(word not in _PARTS for word in found) else {}


def renamed(
    files: Sequence[_core.OpenedFile | None],
    accepted: bool = False,
    ranks: Mapping[int, str | None] = MappingProxyType({}),
    roots: Sequence[Path] = (),
) -> list[Finding]:
    """Report files whose name contradicts the name inside the archive.

    Args:
        files: files as the catalog lists them.
        accepted: whether names may have been changed on purpose (if so, the findings are warnings).
        ranks: rank of each file for messages, by the file's index.
        roots: the directories of the files; without them, contents are not compared.

    Raises:
        FastshardError: if a file cannot be read.
    """
    findings = []
    for index, file in enumerate(files):
        if file is None or not (archive := file["archive"]):
            continue
        name = file["path"].rpartition("/")[2]
        own, inside = places(name), places(archive)
        if not any(inside[word] != own[word] for word in own.keys() & inside.keys()):
            continue
        original = _original(file, inside, files, roots)
        if original is not None and not accepted:
            finding = Finding.of(
                codes.DUPLICATED_SHARD,
                f"a copy of {original}, saved under that name",
                expected=name.partition(".")[0],
                got=archive[:200],
                file=file["path"],
                rank=ranks.get(index),
                help="copy the file of this rank from the node that ran it",
            )
        else:
            finding = Finding.of(
                codes.RENAMED,
                "the file was saved under another name",
                severity="warning" if accepted else None,
                decided="accept renamed" if accepted else None,
                file=file["path"],
                rank=ranks.get(index),
                expected=name.partition(".")[0],
                got=archive[:200],
                help=None
                if accepted
                else "copy the file again from the node that wrote it; if the name is right, accept it",
                run=[] if accepted else ["--accept renamed"],
            )
        findings.append(finding)
    return findings


def _original(
    file: _core.OpenedFile,
    inside: dict[str, int],
    files: Sequence[_core.OpenedFile | None],
    roots: Sequence[Path],
) -> str | None:
    """Return the path of the file of which this one is a copy."""
    folder = file["path"].rpartition("/")[0]
    for other in files if roots else ():
        if other is None or other is file or other["size"] != file["size"]:
            continue
        beside, _, name = other["path"].rpartition("/")
        if beside != folder or places(name) != inside:
            continue
        if safe_files.same(roots[file["root"]] / file["path"], roots[other["root"]] / other["path"]):
            return other["path"]
    return None
