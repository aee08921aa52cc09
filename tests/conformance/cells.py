"""What becomes of a source under a target: proven, or refused by one sentence."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tomlkit
import torch
from fastshard.targets.registry import TARGETS
from helpers import Ran, cli, read_result, sha256
from jax_maker import read, sha
from origins import ORIGINS, Hashes, Origin

#: `merge` first; the others as `--to` knows them.
ALL = ("merge", *TARGETS)
MANIFEST = "fastshard.manifest.json"
TABLE = Path(__file__).parent / "matrix.toml"
#: Options of the targets that divide what they write.
DIVIDED = ("gpt_neox", "megatron", "tp-safetensors", "dcp")
#: Targets that keep every name, so that a merge leads back.
KEEPING = ("merge", "orbax")
#: So much of a refusal is written down.
SAID = 96


@cache
def sheet() -> dict[str, dict[str, Any]]:
    """What was reviewed: by source its title, the targets that are proven, and those that each sentence
    refuses."""
    document: dict[str, dict[str, Any]] = tomlkit.parse(TABLE.read_text()).unwrap()
    return document


def cells(row: dict[str, Any]) -> dict[str, str]:
    """The outcome of each target."""
    found = [(target, "proven") for target in row.get("proven", ())]
    found += [(target, said) for said, targets in row.get("refused", {}).items() for target in targets]
    assert len(dict(found)) == len(found), "a cell stands twice in the table"
    return dict(found)


def renew(name: str, to: str, outcome: str) -> None:
    """Writes one cell down."""
    document = sheet()
    row = document.setdefault(name, {"source": name})
    have = cells(row) | {to: outcome}
    kept = [(target, have[target]) for target in ALL if target in have]
    row["proven"] = [target for target, said in kept if said == "proven"]
    row["refused"] = {}
    for target, said in kept:
        if said != "proven":
            row["refused"].setdefault(said, []).append(target)
    lines = ["# What becomes of each source under each target, and the sentences that refuse.\n"]
    lines.append(
        "# `pytest tests/conformance --renew-snapshots` writes it, then docs/make_matrix.py the page.\n"
    )
    for key in (key for key in ORIGINS if key in document):
        row = document[key]
        lines += [
            f"\n[{key}]\n",
            f"source = {json.dumps(row['source'])}\n",
            f"proven = {json.dumps(row.get('proven', []))}\n",
        ]
        if row.get("refused"):
            lines.append(f"[{key}.refused]\n")
            lines += [
                f"{json.dumps(said)} = {json.dumps(targets)}\n" for said, targets in row["refused"].items()
            ]
    TABLE.write_text("".join(lines))
    sheet.cache_clear()


def options(origin: Origin, to: str) -> tuple[object, ...]:
    """Options of a plan or conversion to a target."""
    if to == "merge":
        return ()
    given: tuple[object, ...] = ("--to", to)
    base = to.partition(":")[0]
    if base in DIVIDED:
        given += ("--tp", 2)
    if base == "megatron":
        given += ("--pp", origin.stages)
    # A store of arrays keeps every row; a DCP divides the padded ones, and the way back cuts them.
    if origin.vocab and base not in ("orbax", "dcp"):
        given += ("--vocab-size", origin.vocab)
    return given


def written(out: Path) -> set[str]:
    """Every file on disk, relative to the result."""
    return {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}


def declared(out: Path) -> set[str]:
    """Every file that the manifest names, and the manifest."""
    document: dict[str, Any] = json.loads((out / MANIFEST).read_text())
    return {file["name"] for file in document["files"]} | {MANIFEST}


def hashes(out: Path) -> Hashes:
    """sha256 by name of a result in safetensors or in an array store, read by their own libraries."""
    if list(out.glob("*.safetensors")):
        return {name: sha256(tensor) for name, tensor in read_result(out).items()}
    return {name: sha(array) for name, array in read(out).items()}


def made(source: Path, out: Path, to: str, origin: Origin) -> Ran:
    """A merge or a conversion; what is asked here is not whether it outlives a power failure."""
    return cli("merge" if to == "merge" else "convert", source, out, *options(origin, to), "--fsync", "none")


def outcome(name: str, root: Path, to: str, folder: Path) -> str:
    """`proven`, or the code, the exit code and the beginning of the sentence that refuses."""
    origin, out = ORIGINS[name], folder / "out"
    planned = cli("plan", root, *options(origin, to))
    assert not list(folder.iterdir()), "a plan wrote something"
    ran = made(root, out, to, origin)
    if ran.code != 0:
        assert not list(folder.iterdir()), "a refusal left something behind"
        (error,) = ran.errors
        # The commands that help are those that were run, with an option more.
        same = [{**said, "run": None} for said in planned.errors] == [{**error, "run": None}]
        assert planned.code == ran.code and same, "the plan said something else"
        assert "\n" not in error["message"] and error["message"], error
        return f"{error['code']} exit {ran.code}: {error['message'][:SAID]}"
    assert planned.code == 0, planned.out
    assert written(out) == declared(out)
    verified = cli("verify", out)
    assert verified.code == 0, verified.out
    _is_right(origin, out, to)
    _leads_back(origin, root, out, to)
    return "proven"


def _is_right(origin: Origin, out: Path, to: str) -> None:
    """Targets that hold whole tensors are read without fastshard, and are what the answers say."""
    if to in KEEPING:
        assert hashes(out) == origin.merged()
    elif to == origin.hub and origin.answer:
        _same(hashes(out), origin)


def _leads_back(origin: Origin, root: Path, out: Path, to: str) -> None:
    """What was written, read as a source of its own, gives the answers again."""
    back = out.parent / "back"
    if to in KEEPING:
        ran = made(out, back, "merge", origin)
        assert ran.code == 0, ran.out
        assert hashes(back) == origin.merged()
        return
    assert origin.answer is not None, "a target took a model whose answers nobody told"
    # A universal checkpoint has the masters, which the weights are roundings of.
    dtype = ("--dtype", "bf16") if to == "universal" and origin.masters else ()
    ran = cli("convert", out, back, *options(origin, origin.hub), *dtype, "--fsync", "none")
    assert ran.code == 0, ran.out
    rounded = origin.rounded and to.startswith("maxtext")
    _same(hashes(back), origin, rounded)
    if rounded:
        assert made(root, out.parent / "direct", origin.hub, origin).code == 0
        _close(back, out.parent / "direct")


def _same(have: Hashes, origin: Origin, rounded: bool = False) -> None:
    assert origin.answer is not None
    want = origin.answer()
    assert set(have) == set(want), set(have) ^ set(want)
    differing = {name for name in want if have[name] != want[name]}
    if rounded:
        # MaxText scales queries: there and back is two roundings.
        differing = {name for name in differing if not name.endswith("q_proj.weight")}
    assert not differing, sorted(differing)


def _close(out: Path, direct: Path) -> None:
    """Queries that were scaled and scaled back differ by what two roundings make of them."""
    ours, theirs = read_result(out), read_result(direct)
    for name, tensor in theirs.items():
        if name.endswith("q_proj.weight"):
            torch.testing.assert_close(ours[name], tensor, rtol=2**-7, atol=0)
