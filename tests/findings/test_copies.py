"""Files and chunks that hold what others hold: copied over them, or equal because they are meant to be."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import moe_maker
import neox_maker
import numpy as np
import orbax_maker
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zero_maker
from helpers import FIXTURES, assert_refused, cli, copy, layer_file, load_pt, read_result
from holding import HANG
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

TORCH_DIST = "sharded/megatron_torch_dist_tp2_pp2"
GENERATOR = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def saved_again(source: Path, destination: Path) -> None:
    """What a wrong rank saves: another's content under its own name."""
    torch.save(load_pt(source), destination)


def dcp_saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)
    return folder


# --- files


@pytest.mark.parametrize(("original", "file"), [("0_0", "2_0"), ("1_0", "3_0"), ("1_1", "3_1")])
def test_a_distcp_file_copied_over_another_is_refused(original: str, file: str, tmp_path: Path) -> None:
    ckpt = copy(FIXTURES / TORCH_DIST, tmp_path / "ckpt")
    step = next(ckpt.glob("iter_*"))
    shutil.copyfile(step / f"__{original}.distcp", step / f"__{file}.distcp")
    for to in ((), ("--to", "megatron:legacy")):
        command = ("convert", *to) if to else ("merge",)
        ran = cli(command[0], ckpt, tmp_path / "out", *command[1:])
        assert ran.code == 1 and not (tmp_path / "out").exists(), ran.findings
    assert ran.having("FS303"), ran.findings
    (told, *_) = ran.having("FS303")
    for name in (f"__{original}.distcp", f"__{file}.distcp"):
        assert name in told["file"] + told["message"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("file", [zero_maker.optim_file, zero_maker.model_file])
def test_a_zero3_rank_that_saved_another_s_content_is_refused(
    file: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """No name inside tells: the bytes do. Rank 0's model file holds buffers that are taken of it alone."""
    tensors = {"up": torch.randn(40, 33), "down": torch.randn(33, 40)}
    frozen = {"embed": torch.randn(47, 34)}
    if dtype == torch.uint8:
        # As quantised weights are.
        frozen = {"embed": torch.randint(0, 255, (47, 34), dtype=dtype)}
    buffers = {"scale": torch.tensor([1.5])}
    run = zero_maker.Run(3, 3, torch.bfloat16, [tensors], frozen=frozen, buffers=buffers)
    good = zero_maker.write(tmp_path / "good", run)
    assert cli("merge", good, tmp_path / "good_out").code == 0
    for one, two in itertools.permutations(range(3), 2):
        ckpt = copy(good, tmp_path / f"ckpt{one}{two}")
        zero_maker.save(zero_maker.load(ckpt / file(one)), ckpt / file(two))
        assert_refused(ckpt, tmp_path / "out", "FS303", file=file(max(one, two)) if one and two else "")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_neox_layer_that_was_saved_as_another_is_refused(tp: int, tmp_path: Path) -> None:
    root = neox_maker.write(tmp_path / "ckpt", neox_maker.Spec(tp=tp, layers=3))
    step = root / "global_step7"
    for rank in range(tp):
        saved_again(step / layer_file(3, rank), step / layer_file(4, rank))
    assert_refused(root, tmp_path / "out", "FS303")
    ran = cli("merge", root, tmp_path / "out", "--accept", "copies")
    assert ran.code == 0, ran.findings
    merged = read_result(tmp_path / "out")
    name = "attention.query_key_value.weight"
    assert torch.equal(merged[f"3.{name}"], merged[f"4.{name}"])
    # What was accepted is on record.
    manifest = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    assert [f["severity"] for f in manifest["findings"] if f["code"] == "FS303"] == ["warning"] * tp


def test_copies_are_accepted_by_name(tmp_path: Path) -> None:
    root = neox_maker.write(tmp_path / "ckpt", neox_maker.Spec(tp=1, layers=4))
    step = root / "global_step7"
    saved_again(step / layer_file(2, 0), step / layer_file(3, 0))
    saved_again(step / layer_file(2, 0), step / layer_file(4, 0))
    one = f"copies=*{layer_file(3, 0)}"
    assert_refused(root, tmp_path / "out", "FS303", file=layer_file(4, 0), options=("--accept", one))
    both = ("--accept", one, "--accept", f"copies=*{layer_file(4, 0)}")
    assert cli("merge", root, tmp_path / "out", *both).code == 0


@pytest.mark.parametrize("what", ["copy", "copies=", "renamed=x", "older"])
def test_what_cannot_be_accepted_is_usage(what: str, tmp_path: Path) -> None:
    ran = cli("merge", FIXTURES / "gpt_neox/neox_pp_tp1", tmp_path / "out", "--accept", what)
    assert ran.code == 2 and "copies=GLOB" in ran.errors[0]["expected"], ran.findings


def ranks_saved(folder: Path, *ranks: dict[str, torch.Tensor], **options: Any) -> Path:
    """What several ranks of a run save, each its own tensors: their files, and one `.metadata`."""
    metadata = None
    for rank, tensors in enumerate(ranks):
        part = folder.parent / f"{folder.name}-{rank}"
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(part, **options), no_dist=True)
        own = dcp.FileSystemReader(part).read_metadata()
        folder.mkdir(exist_ok=True)
        names = {}
        for file in part.glob("*.distcp"):
            names[file.name] = file.name.replace("__0_", f"__{rank}_", 1)
            file.rename(folder / names[file.name])
        for place in own.storage_data.values():
            place.relative_path = names[place.relative_path]
        if metadata is None:
            metadata = own
        else:
            metadata.state_dict_metadata |= own.state_dict_metadata
            metadata.storage_data |= own.storage_data
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    return folder


def drawn(*names: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(32, 48).to(dtype) for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.complex64, torch.int8])
def test_a_file_with_more_in_it_copied_over_one_with_less_is_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    make = {torch.int8: lambda: torch.randint(-99, 99, (32, 48), dtype=dtype)}.get(dtype)
    first = {f"a.{i}": make() if make else torch.randn(32, 48).to(dtype) for i in range(3)}
    other = {f"b.{i}": make() if make else torch.randn(32, 48).to(dtype) for i in range(3)}
    ckpt = ranks_saved(tmp_path / "ckpt", first | drawn("norm"), other)
    assert cli("merge", ckpt, tmp_path / "good").code == 0
    shutil.copyfile(ckpt / "__0_0.distcp", ckpt / "__1_0.distcp")
    assert_refused(ckpt, tmp_path / "out", "FS303", file="__1_0.distcp")


@pytest.mark.parametrize(
    ("one", "other"), [("encoder.layer", "decoder.layer"), ("member_a", "member_b"), ("layers.0", "layers.1")]
)
def test_words_that_tell_of_no_copy_excuse_none(one: str, other: str, tmp_path: Path) -> None:
    parts = ("a", "b", "c")
    ckpt = ranks_saved(
        tmp_path / "ckpt", drawn(*(f"{one}.{p}" for p in parts)), drawn(*(f"{other}.{p}" for p in parts))
    )
    shutil.copyfile(ckpt / "__0_0.distcp", ckpt / "__1_0.distcp")
    assert_refused(ckpt, tmp_path / "out", "FS303", file="__1_0.distcp")


def test_a_rank_that_holds_all_twice_is_a_copy_all_the_same(tmp_path: Path) -> None:
    """The model and its average at the beginning, in each rank's file."""

    def rank(*names: str) -> dict[str, torch.Tensor]:
        held = drawn(*names)
        return {f"{which}.{name}": t.clone() for which in ("model", "ema") for name, t in held.items()}

    ckpt = ranks_saved(tmp_path / "ckpt", rank("layers.0.a", "layers.0.b"), rank("layers.1.a", "layers.1.b"))
    assert cli("merge", ckpt, tmp_path / "good").code == 0
    shutil.copyfile(ckpt / "__0_0.distcp", ckpt / "__1_0.distcp")
    assert_refused(ckpt, tmp_path / "out", "FS303", file="__1_0.distcp")


def test_integers_of_its_own_do_not_hide_a_rank_that_is_a_copy(tmp_path: Path) -> None:
    def state() -> torch.Tensor:
        return torch.randint(0, 255, (2000,), dtype=torch.uint8)

    floats = drawn("x", "y")
    ranks = [{f"l.{r}.{n}": t for n, t in floats.items()} | {f"rng.{r}": state()} for r in range(2)]
    assert_refused(ranks_saved(tmp_path / "ckpt", *ranks), tmp_path / "out", "FS303", file="__1_0.distcp")


@pytest.mark.parametrize("layers", [3, 4])
def test_one_layer_saved_over_all_others_is_refused(layers: int, tmp_path: Path) -> None:
    root = neox_maker.write(tmp_path / "ckpt", neox_maker.Spec(tp=1, layers=layers))
    step = root / "global_step7"
    for layer in range(3, layers + 2):
        saved_again(step / layer_file(2, 0), step / layer_file(layer, 0))
    ran = assert_refused(root, tmp_path / "out", "FS303")
    assert len(ran.having("FS303")) == layers - 1


def test_a_pattern_that_is_none_is_usage(tmp_path: Path) -> None:
    for pattern in ("[", "**layer_03**"):
        ran = cli(
            "merge", FIXTURES / "gpt_neox/neox_pp_tp1", tmp_path / "out", "--accept", f"copies={pattern}"
        )
        assert ran.code == 2 and not (tmp_path / "out").exists(), ran.findings


# --- files that are meant to be equal


def test_doubled_layers_of_a_hugging_face_model_only_warn(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    weights = {name: torch.randn(64, 64) for name in ("q", "k", "v")}
    index: dict[str, Any] = {"metadata": {"total_size": 4 * 3 * 64 * 64 * 4}, "weight_map": {}}
    for layer in range(4):
        # The third layer is the second once more.
        held = weights if layer in (1, 2) else {name: torch.randn(64, 64) for name in weights}
        file = f"model-{layer + 1:05d}-of-00004.safetensors"
        tensors = {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in held.items()}
        save_file(tensors, ckpt / file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, file)
    (ckpt / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = cli("merge", ckpt, tmp_path / "out")
    assert ran.code == 0, ran.findings
    assert ran.having("FS304", file="model-00003-of-00004", message="model-00002-of-00004")


def test_an_average_of_the_weights_at_its_beginning_is_no_copy(tmp_path: Path) -> None:
    weights = {f"layers.{i}.weight": torch.randn(64, 64) for i in range(3)}
    tensors = {f"{copy}.{name}": t.clone() for copy in ("model", "ema") for name, t in weights.items()}
    ran = cli("merge", dcp_saved(tmp_path / "dcp", tensors), tmp_path / "dcp_out")
    assert ran.code == 0 and not ran.having("FS303"), ran.findings
    for name, tensor in tensors.items():
        orbax_maker.write(tmp_path / "orbax", name, tensor.numpy(), [64, 64])
    orbax_maker.describe(tmp_path / "orbax", list(tensors))
    ran = cli("merge", tmp_path / "orbax", tmp_path / "orbax_out")
    assert ran.code == 0 and not ran.having("FS303"), ran.findings
    (told,) = ran.having("FS304")
    assert "3 chunks of 3 tensors" in told["message"]


def test_a_tied_head_that_is_stored_twice_is_no_copy(tmp_path: Path) -> None:
    table = torch.randn(128, 32)
    tensors = {
        "model.embed_tokens.weight": table,
        "lm_head.weight": table.clone(),
        "norm.weight": torch.ones(32),
    }
    for name, tensor in tensors.items():
        orbax_maker.write(tmp_path / "orbax", name, tensor.numpy(), [*tensor.shape])
    orbax_maker.describe(tmp_path / "orbax", list(tensors))
    ran = cli("merge", tmp_path / "orbax", tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS303"), ran.findings


def test_a_part_of_the_embedding_in_the_head_is_refused(tmp_path: Path) -> None:
    arrays = {"model.embed_tokens.weight": normal(128, 32), "lm_head.weight": normal(128, 32)}
    ckpt = store(tmp_path / "ckpt", arrays, [64, 32])
    shutil.copyfile(
        chunk_file(ckpt, "model.embed_tokens.weight", 0, 0), chunk_file(ckpt, "lm_head.weight", 0, 0)
    )
    assert_refused(ckpt, tmp_path / "out", "FS303", file=".weight/0.0")


def test_layers_that_were_all_doubled_are_meant(tmp_path: Path) -> None:
    """Depth up-scaling of each layer, in files of layers: no accident does that."""
    root = neox_maker.write(tmp_path / "ckpt", neox_maker.Spec(tp=1, layers=4))
    step = root / "global_step7"
    for layer in (2, 4):
        saved_again(step / layer_file(layer, 0), step / layer_file(layer + 1, 0))
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.errors
    assert {f["severity"] for f in ran.having("FS304")} == {"warning"}


@pytest.mark.parametrize("files", ["one", "each"])
@pytest.mark.parametrize(
    "key",
    [
        "rotary",
        "average",
        "policy",
        "experts",
        "tied",
        "positions",
        "frozen",
        "deeper",
        "lookahead",
        "amsgrad",
        "moco",
        "draft",
        "order",
        "shared expert",
    ],
)
def test_what_is_equal_by_its_nature_is_no_copy(key: str, files: str, tmp_path: Path) -> None:
    """In one file, and in one for each tensor."""
    base = drawn(*(f"layers.{i}.{n}" for i in range(3) for n in ("q", "k")))
    one, made = torch.randn(32, 48), torch.randn(3, 32, 48)
    tensors = {
        "rotary": base | {f"layers.{i}.rotary.inv_freq": one for i in range(3)},
        "average": {f"{m}.{n}": t for m in ("model", "ema") for n, t in base.items()},
        "policy": {f"{m}.{n}": t for m in ("policy", "ref") for n, t in base.items()}
        | drawn(*(f"ref.head.{n}" for n in "ab")),
        "experts": base | {f"layers.{i}.experts.{e}.w": made[i] for i in range(3) for e in range(4)},
        "tied": base | {"0.word_embeddings.weight": one, "9.final_linear.weight": one},
        "positions": base | {"encoder.pos.pe": one, "decoder.pos.pe": one},
        "frozen": {f"{m}.{n}": t for m in ("model", "target") for n, t in base.items() if ".q" in n}
        | drawn(*(f"{m}.layers.{i}.k" for m in ("model", "target") for i in range(3))),
        "deeper": base
        | {f"layers.3.{n}": base[f"layers.2.{n}"] for n in ("q", "k")}
        | {f"layers.{i}.norm": torch.ones(32, 48) for i in range(4)},
        "lookahead": {f"params.{m}.{n}": t for m in ("fast", "slow") for n, t in base.items()},
        "amsgrad": base
        | {f"optim.{n}.{m}": t * t for m in ("exp_avg_sq", "max_exp_avg_sq") for n, t in base.items()},
        "moco": {f"encoder_{m}.{n}": t for m in "qk" for n, t in base.items()},
        "draft": base
        | {f"layers.2.{n}": torch.randn(32, 48) for n in ("v", "o")}
        | {f"draft.layers.0.{n}": base[f"layers.2.{n}"] for n in ("q", "k")},
        "order": base | {f"layers.{i}.mlp.g_idx": torch.arange(1536).view(32, 48) for i in range(3)},
        "shared expert": base
        | {f"layers.0.mlp.{e}.w": one for e in ("shared_experts", *(f"experts.{i}" for i in range(4)))},
    }[key]
    if key == "draft":
        tensors |= {f"draft.layers.0.{n}": tensors[f"layers.2.{n}"] for n in ("v", "o")}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    ckpt = ranks_saved(tmp_path / "ckpt", tensors, single_file_per_rank=files == "one")
    ran = cli("merge", ckpt, tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS303"), ran.errors
    for name, tensor in tensors.items():
        orbax_maker.write(tmp_path / "orbax", name, tensor.numpy(), [32, 48])
    orbax_maker.describe(tmp_path / "orbax", list(tensors))
    ran = cli("merge", tmp_path / "orbax", tmp_path / "orbax_out")
    assert ran.code == 0 and not ran.having("FS303"), ran.errors


def test_scales_that_are_equal_are_no_copy_of_the_weights(tmp_path: Path) -> None:
    scale = torch.randn(64, 4)
    quantised = [torch.randint(-99, 99, (32, 48), dtype=torch.int8) for _ in range(2)]
    ckpt = ranks_saved(
        tmp_path / "ckpt", *({f"l.{r}.q": quantised[r], f"l.{r}.scale": scale} for r in range(2))
    )
    ran = cli("merge", ckpt, tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS303"), ran.errors


def made_of_one(model: Any) -> dict[str, torch.Tensor]:
    """A mixture whose experts were all made of one."""
    whole: dict[str, torch.Tensor] = model.state_dict()
    for name, tensor in whole.items():
        if ".experts." in name and tensor.ndim == 3:
            tensor.copy_(tensor[:1].clone().expand_as(tensor))
    return whole


@pytest.mark.parametrize("degrees", [(1, 1, 4), (1, 1, 2), (2, 1, 4), (2, 1, 2), (2, 2, 2)])
@pytest.mark.parametrize("form", ["sequential", "grouped", "flat"])
def test_experts_on_all_ranks_that_were_made_of_one_are_no_copies(
    form: str, degrees: tuple[int, int, int], tmp_path: Path
) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", made_of_one(moe_maker.model()), degrees, form)
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS303"), ran.errors


def divided(folder: Path, *ranks: dict[str, tuple[list[int], list[int], torch.Tensor]]) -> Path:
    """A DCP of parts: per rank, the whole's shape, the part's first index, and the part."""
    folder.mkdir()
    described: dict[str, TensorStorageMetadata] = {}
    stored: dict[Any, Any] = {}
    for rank, held in enumerate(ranks):
        place = ranks_saved(folder.parent / f"{folder.name}_{rank}", {n: t for n, (_, _, t) in held.items()})
        own = dcp.FileSystemReader(place).read_metadata()
        (place / "__0_0.distcp").rename(folder / f"__{rank}_0.distcp")
        for index, info in own.storage_data.items():
            info.relative_path = f"__{rank}_0.distcp"
            whole, at, part = held[index.fqn]
            entry = described.setdefault(
                index.fqn,
                TensorStorageMetadata(own.state_dict_metadata[index.fqn].properties, torch.Size(whole), []),
            )
            entry.chunks.append(ChunkStorageMetadata(torch.Size(at), part.shape))
            stored[MetadataIndex(index.fqn, torch.Size(at))] = info
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(described, storage_data=stored), file)
    return folder


@pytest.mark.parametrize(("ranks", "experts"), [(2, 8), (4, 8), (2, 4)])
def test_stacked_experts_on_few_ranks_that_were_made_of_one_are_no_copies(
    ranks: int, experts: int, tmp_path: Path
) -> None:
    made = {f"layers.{i}.moe.experts.w1": torch.randn(1, 32, 48).expand(experts, 32, 48) for i in range(2)}
    each = experts // ranks
    parts: list[dict[str, Any]] = [
        {n: ([experts, 32, 48], [r * each, 0, 0], t[:each].contiguous()) for n, t in made.items()}
        for r in range(ranks)
    ]
    parts[0] |= {n: ([32, 48], [0, 0], t) for n, t in drawn("layers.0.q", "layers.1.q").items()}
    ran = cli("merge", divided(tmp_path / "ckpt", *parts), tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS303"), ran.errors
    # Of experts that are not the same inside a rank, the other rank's are copies.
    parts[1] = {n: (w, at, torch.randn_like(t)) for n, (w, at, t) in parts[1].items()}
    parts[0] |= {n: (w, [0, 0, 0], t) for n, (w, _, t) in parts[1].items()}
    assert_refused(divided(tmp_path / "bad", *parts), tmp_path / "not", "FS303")


@pytest.mark.parametrize("kind", ["experts", "deeper", "three"])
def test_what_is_equal_for_two_reasons_is_no_copy(kind: str, tmp_path: Path) -> None:
    """A file for each tensor: what the first of several equal ones does not excuse, another does."""
    base = drawn(*(f"layers.{i}.{n}" for i in range(3) for n in ("q", "k")))
    one = torch.randn(32, 48)
    base |= {
        "experts": {f"layers.0.experts.{e}.w": one for e in range(4)},
        "deeper": {f"layers.3.{n}": base[f"layers.2.{n}"] for n in ("q", "k")},
        "three": {},
    }[kind]
    models = ("base", "policy", "value") if kind == "three" else ("ema", "model")
    tensors = {f"{m}.{name}": tensor.clone() for m in models for name, tensor in base.items()}
    ran = cli("merge", ranks_saved(tmp_path / "ckpt", tensors, single_file_per_rank=False), tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS303"), ran.errors


@pytest.mark.parametrize("layers", [(3,), (3, 5)])
def test_a_shard_of_two_values_says_nothing(layers: tuple[int, ...], tmp_path: Path) -> None:
    root = neox_maker.write(tmp_path / "ckpt", neox_maker.Spec(tp=2, layers=4))
    for layer, rank in itertools.product(layers, (0, 1)):
        if len(layers) == 2 and rank:
            continue  # Equal in two layers, on one rank alone.
        file = root / "global_step7" / layer_file(layer, rank)
        content = load_pt(file)
        (name,) = (n for n in content if n.endswith("mlp.linear1.bias"))
        content[name].zero_()[3] = 1e-3
        torch.save(content, file)
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS303"), ran.errors


def test_two_directories_that_hold_the_same_are_as_one(tmp_path: Path) -> None:
    root = neox_maker.write(tmp_path / "node0", neox_maker.Spec(tp=1, layers=4))
    step = root / "global_step7"
    for layer in (2, 4):
        saved_again(step / layer_file(layer, 0), step / layer_file(layer + 1, 0))
    copy(root, tmp_path / "node1")
    ran = cli("merge", root, tmp_path / "node1", tmp_path / "out")
    assert ran.code == 0, ran.errors


def test_many_files_of_constants_are_looked_at_once(tmp_path: Path) -> None:
    """Norms at their beginning, each in a file of its own."""
    tensors = {f"layers.{i}.norm": torch.ones(4096) for i in range(300)} | drawn("w")
    ckpt = ranks_saved(tmp_path / "ckpt", tensors, single_file_per_rank=False)
    ran = cli("merge", ckpt, tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS304"), ran.errors


# --- chunks


def store(folder: Path, arrays: dict[str, np.ndarray], chunk: list[int], zarr: int = 2) -> Path:
    for name, values in arrays.items():
        orbax_maker.write(folder, name, values, chunk[: values.ndim], zarr=zarr)
    orbax_maker.describe(folder, list(arrays), zarr3=zarr == 3)
    return folder


def chunk_file(folder: Path, name: str, *index: int, zarr: int = 2) -> Path:
    if zarr == 3:
        return folder / name / "c" / "/".join(map(str, index))
    return folder / name / ".".join(map(str, index))


@pytest.mark.parametrize("zarr", [2, 3])
def test_a_chunk_copied_over_another_is_refused(zarr: int, tmp_path: Path) -> None:
    arrays = {f"layers_{i}.kernel": normal(64, 64) for i in range(3)}
    good = store(tmp_path / "good", arrays, [32, 32], zarr)
    assert cli("merge", good, tmp_path / "good_out").code == 0
    places = [*itertools.product((0, 1), (0, 1))]
    for n, (one, two) in enumerate(itertools.combinations(places, 2)):
        ckpt = copy(good, tmp_path / f"ckpt{n}")
        source = chunk_file(ckpt, "layers_1.kernel", *one, zarr=zarr)
        shutil.copyfile(source, chunk_file(ckpt, "layers_1.kernel", *two, zarr=zarr))
        assert_refused(ckpt, tmp_path / "out", "FS303", tensor="layers_1.kernel")
        ckpt = copy(good, tmp_path / f"other{n}")
        source = chunk_file(ckpt, "layers_0.kernel", *one, zarr=zarr)
        shutil.copyfile(source, chunk_file(ckpt, "layers_2.kernel", *one, zarr=zarr))
        assert_refused(ckpt, tmp_path / "out", "FS303", tensor="layers_2.kernel")


@pytest.mark.parametrize("name", ["position_emb.emb_var", "pos_embed", "rel_pos_h"])
def test_a_part_of_a_learned_table_of_positions_is_no_buffer(name: str, tmp_path: Path) -> None:
    ckpt = store(tmp_path / "ckpt", {name: normal(64, 64)}, [64, 32])
    shutil.copyfile(chunk_file(ckpt, name, 0, 0), chunk_file(ckpt, name, 0, 1))
    assert_refused(ckpt, tmp_path / "out", "FS303", file=f"{name}/0.1")


def test_a_finding_names_a_file_that_is_there(tmp_path: Path) -> None:
    """Where no file but those of arrays stands for a store."""
    ckpt = copy(FIXTURES / "orbax/paxml_gpt3_micro_weights", tmp_path / "ckpt")
    (one,) = ckpt.rglob("*.emb_var/0.0")
    shutil.copyfile(one, one.with_name("0.1"))
    (told,) = assert_refused(ckpt, tmp_path / "out", "FS303").having("FS303")
    assert (ckpt / told["file"]).samefile(one.with_name("0.1"))
    # So that it can be copied again, or accepted.
    assert cli("merge", ckpt, tmp_path / "out", "--accept", f"copies={told['file']}").code == 0


def test_one_chunk_of_one_array_copied_over_another_array_s_is_refused(tmp_path: Path) -> None:
    names = [f"layers_{i}.{name}.kernel" for i in range(3) for name in ("wi_0", "wi_1", "wo")]
    good = store(tmp_path / "good", {name: normal(32, 32) for name in names}, [32, 32])
    for n, (one, two) in enumerate(itertools.permutations(names, 2)):
        ckpt = copy(good, tmp_path / f"ckpt{n}")
        shutil.copyfile(chunk_file(ckpt, one, 0, 0), chunk_file(ckpt, two, 0, 0))
        (told,) = assert_refused(ckpt, tmp_path / "out", "FS303").errors
        assert {told["tensor"]} < {one, two}


def test_a_run_that_is_continued_looks_at_all_chunks(tmp_path: Path) -> None:
    """Tiles that an earlier run has written are not made again; their chunks are looked at all the same."""
    arrays = {f"layers_{i}.kernel": normal(512, 512) for i in range(3)}
    good = store(tmp_path / "ckpt", arrays, [256, 512])
    shutil.copyfile(chunk_file(good, "layers_0.kernel", 0, 0), chunk_file(good, "layers_1.kernel", 0, 0))
    options = ("--fsync", "none", "--memory", "2GiB")
    assert cli("merge", good, tmp_path / "out", *options).code == 1
    # The same with a companion that cannot be read at the end: what is written stays for --resume.
    (good / "tokenizer.json").write_text("{}")
    (good / "tokenizer.json").chmod(0)
    ran = cli("merge", good, tmp_path / "out", "--resume", *options)
    assert ran.code in (1, 2) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("mask_decoder.layers.0.q_proj", "mask_decoder.layers.1.k_proj"),
        ("encoder.layers.0.self_attn.linear_pos.weight", "encoder.layers.1.self_attn.linear_pos.weight"),
        ("layers_0.shared_experts.wi_0.kernel", "layers_1.shared_experts.wi_0.kernel"),
        ("opt.exp_avg.layers.0.w", "opt.exp_avg_sq.layers.0.w"),
        ("model.0.weight", "ema.1.weight"),
        ("decoder.multihead_attention.query.kernel", "decoder.multihead_attention.key.kernel"),
        ("encoderblock_0.attention.out.kernel", "encoderblock_1.attention.out.kernel"),
        ("decoder.dense_layers_0.attention.out.kernel", "decoder.dense_layers_1.attention.out.kernel"),
        ("visual.resblocks.0.attn.out_proj.weight", "visual.resblocks.1.attn.out_proj.weight"),
        ("down.0.resnets.0.time_emb_proj.weight", "down.0.resnets.1.time_emb_proj.weight"),
        ("decoder.layers_0.mlp.shared.kernel", "decoder.layers_1.mlp.shared.kernel"),
        ("embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"),
        ("blocks.0.attn.rel_pos_h", "blocks.1.attn.rel_pos_h"),
        ("pos_embed", "decoder.pos_embed"),
        ("opt.layers.0.w_m", "opt.layers.0.w_v"),
        ("enc.fc_m.weight", "enc.fc_v.weight"),
        ("actor.q_proj.weight", "critic.k_proj.weight"),
        ("policy.up.w", "policy.old.down.w"),
        ("kfac.layers.0.A_inv", "kfac.layers.1.A_inv"),
        ("encoder.layers.0.position_embeddings", "encoder.layers.1.position_embeddings"),
        ("params.layers.0.index.q", "params.layers.1.index.k"),
        ("params.layers.0.mask.gate", "params.layers.1.mask.up"),
        ("mu.decoder.logits_dense.kernel", "nu.decoder.logits_dense.kernel"),
        ("opt_state.mu.token_embedder.embedding", "opt_state.nu.token_embedder.embedding"),
        ("params.token_embedder.embedding", "opt_state.mu.token_embedder.embedding"),
        ("params.head.kernel", "opt_state.nu.head.kernel"),
        ("params.encoderblock_0.out.kernel", "opt_state.mu.encoderblock_1.out.kernel"),
    ],
)
def test_no_word_in_a_name_excuses_what_is_learned(one: str, two: str, tmp_path: Path) -> None:
    other = one.replace("q_proj", "v_proj").replace(".0.", ".7.").replace("query", "value")
    arrays = {name: normal(32, 48) for name in (one, two, f"{other}_")}
    ckpt = store(tmp_path / "ckpt", arrays, [32, 48])
    shutil.copyfile(chunk_file(ckpt, one, 0, 0), chunk_file(ckpt, two, 0, 0))
    assert_refused(ckpt, tmp_path / "out", "FS303")


@pytest.mark.parametrize("kind", ["first columns", "left half", "few rows"])
def test_a_chunk_that_is_mostly_zeros_is_looked_at_whole(kind: str, tmp_path: Path) -> None:
    arrays = {f"layers_{i}.kernel": normal(256, 4096) for i in range(3)}
    for values in arrays.values():
        if kind == "few rows":
            rows = [3, 7, 100]
            kept = values[rows].copy()
            values[:] = 0
            values[rows] = kept
        else:
            values[:, : 16 if kind == "first columns" else 2048] = 0
    ckpt = store(tmp_path / "ckpt", arrays, [256, 4096])
    shutil.copyfile(chunk_file(ckpt, "layers_0.kernel", 0, 0), chunk_file(ckpt, "layers_1.kernel", 0, 0))
    assert_refused(ckpt, tmp_path / "out", "FS303", tensor="layers_1.kernel")


# --- chunks that are meant to be equal


def test_what_stores_hold_equal_by_its_nature_is_no_copy(tmp_path: Path) -> None:
    table, one = normal(128, 32), normal(32, 48)
    half = normal(64, 32)
    expert = normal(48, 64)
    cases: dict[str, tuple[dict[str, np.ndarray], list[int]]] = {
        "a deeper model": (
            {f"decoder.layers_{i}.mlp.{n}": normal(32, 48) for i in range(3) for n in ("wi_0", "wi_1", "wo")},
            [32, 48],
        ),
        "tables of two towers": (
            {
                f"{n}.weight": table
                for n in ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
            },
            [128, 32],
        ),
        "an average far down": (
            {
                "params.layers.0.w": one,
                "opt_state.1.0.ema.layers.0.w": one,
                "params.layers.1.w": normal(32, 48),
            },
            [32, 48],
        ),
        "stacked frequencies": ({"layers.rotary_emb.inv_freq": np.tile(normal(128), (3, 1))}, [1, 128]),
        "two halves": ({"rotary_emb.cos_cached": np.concatenate([half, half], axis=1)}, [64, 32]),
        "parts of experts": ({"layers_0.experts": np.tile(expert, (4, 1, 1))}, [1, 24, 64]),
        "experts of stacked layers": (
            {"layers.MoeBlock_0.wi": np.stack([np.tile(normal(48, 64), (4, 1, 1)) for _ in range(2)])},
            [1, 1, 48, 64],
        ),
    }
    deeper = cases["a deeper model"][0]
    deeper |= {name.replace("layers_2", "layers_3"): v for name, v in deeper.items() if "layers_2" in name}
    for number, (name, (arrays, chunk)) in enumerate(cases.items()):
        ran = cli("merge", store(tmp_path / f"ckpt{number}", arrays, chunk), tmp_path / f"out{number}")
        assert ran.code == 0 and not ran.having("FS303"), (name, ran.errors)


def test_experts_that_were_made_of_one_are_no_copies(tmp_path: Path) -> None:
    dense = normal(48, 64)
    arrays = {
        # All experts in one array, divided by experts: four chunks alike, or two with two alike inside.
        "layers_0.experts": np.broadcast_to(dense, (4, 48, 64)).copy(),
        "layers_1.experts": np.broadcast_to(normal(48, 64), (4, 48, 64)).copy(),
    }
    for n, chunk in enumerate(([1, 48, 64], [2, 48, 64], [2, 24, 64])):
        ran = cli("merge", store(tmp_path / f"ckpt{n}", arrays, chunk), tmp_path / f"out{n}")
        assert ran.code == 0 and not ran.having("FS303"), ran.findings


def test_a_buffer_that_all_layers_hold_is_no_copy(tmp_path: Path) -> None:
    frequencies = normal(128)
    arrays = {f"layers_{i}.rotary": frequencies for i in range(3)}
    arrays |= {f"layers_{i}.kernel": normal(64, 64) for i in range(3)}
    ran = cli("merge", store(tmp_path / "ckpt", arrays, [128, 64]), tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS303"), ran.findings


def test_rows_that_were_added_alike_are_no_copies(tmp_path: Path) -> None:
    """Rows of an enlarged vocabulary that are the mean of the others."""
    table = normal(256, 64)
    table[128:] = table[:128].mean(axis=0)
    ran = cli("merge", store(tmp_path / "ckpt", {"embedding": table}, [32, 64]), tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS303"), ran.findings


# --- what no file can settle


SWAPPED = {
    "chunks": (
        "maxtext_twins/a_mt_bf16_unscan_noocdbt_zarr2",
        "params.params.decoder.layers_*.mlp.wi_0.kernel/0.0",
    ),
    "ranks of slices": ("sharded/tp4_micro", "tp_rank_*.safetensors"),
    "distcp": (TORCH_DIST, "__[02]_0.distcp"),
    "legacy ranks": ("sharded/megatron_legacy_tp2_pp2", "mp_rank_*_000/model_optim_rng.pt"),
}


@pytest.mark.parametrize("key", SWAPPED)
def test_what_nothing_tells_is_named_and_a_manifest_settles_it(key: str, tmp_path: Path) -> None:
    source, pattern = SWAPPED[key]
    ckpt = copy(FIXTURES / source, tmp_path / "ckpt")
    assert cli("manifest", ckpt, "-o", tmp_path / "manifest.json").code == 0
    ran = cli("merge", ckpt, tmp_path / "good", "--expect", tmp_path / "manifest.json")
    assert ran.code == 0 and "would go unnoticed" not in ran.not_checked, ran.findings
    assert "would go unnoticed" not in (tmp_path / "good/fastshard.manifest.json").read_text()
    one, two, *_ = sorted(ckpt.rglob(pattern))
    (ckpt / "aside").write_bytes(one.read_bytes())
    one.write_bytes(two.read_bytes())
    (ckpt / "aside").rename(two)
    ran = cli("merge", ckpt, tmp_path / "out")
    assert ran.code == 0, ran.findings
    assert "would go unnoticed" in ran.not_checked and "--expect" in ran.not_checked
    manifest = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    assert "would go unnoticed" in " ".join(manifest["not_checked"])
    ran = cli("verify", ckpt, "--expect", tmp_path / "manifest.json")
    assert ran.code == 1 and ran.having("FS308"), ran.findings
    assert "would go unnoticed" not in ran.not_checked


def test_files_of_universal_that_bear_one_name_inside_are_named(tmp_path: Path) -> None:
    ckpt = copy(FIXTURES / "universal/zero1_bf16_dp2", tmp_path / "ckpt")
    one, two = sorted(ckpt.rglob("zero/norm.*/exp_avg.pt"))
    one.rename(ckpt / "aside")
    two.rename(one)
    (ckpt / "aside").rename(two)
    ran = cli("merge", ckpt, tmp_path / "out", "--optimizer")
    assert ran.code == 0 and "exp_avg.pt" in ran.not_checked, ran.errors


@pytest.mark.parametrize("source", ["gpt_neox/neox_pp_tp2", "deepspeed/zero3_bf16_dp2", "sharded/hf_sharded"])
def test_files_that_tell_what_they_are_are_not_doubted(source: str, tmp_path: Path) -> None:
    ran = cli("merge", FIXTURES / source, tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS114"), ran.findings


# --- all of them


@pytest.mark.slow
@pytest.mark.parametrize(
    "series", [("pairs", "--fixtures-dir", FIXTURES, "--most", 3), ("families", "--count", 5)]
)
def test_a_few_trials(series: tuple[object, ...], tmp_path: Path) -> None:
    """Pairs of like files copied and swapped, and families that must not be accused."""
    script = Path(__file__).parents[1] / f"trials/{series[0]}.py"
    command = [sys.executable, script, *series[1:], "--folder", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one rank", "all ranks"])
def test_a_file_of_another_stage_is_named_before_its_effects(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Equal files may be meant; not where the tensors of the file's own stage are missing."""
    root = copy(FIXTURES / "sharded/megatron_legacy_tp2_pp2", tmp_path / "ckpt")
    file = "iter_0000010/mp_rank_{:02d}_{:03d}/model_optim_rng.pt"
    for rank in ranks:
        shutil.copy(root / file.format(rank, 0), root / file.format(rank, 1))
    ran = cli("verify", root)
    assert ran.code == 1 and [f["code"] for f in ran.errors] == ["FS303"] * len(ranks)
    assert [f["file"] for f in ran.errors] == [file.format(rank, 1) for rank in ranks]
    missing = ["decoder.final_layernorm.weight", "output_layer.weight"]
    assert all(f["effect"]["tensors"] == missing for f in ran.errors)
    # What was copied on purpose is no excuse for what is missing.
    assert [f["file"] for f in cli("verify", root, "--accept", "copies").errors] == [
        f["file"] for f in ran.errors
    ]


def test_of_a_path_in_several_roots_the_root_is_named(tmp_path: Path) -> None:
    file = "iter_0000010/mp_rank_00_000/model_optim_rng.pt"
    roots = [copy(FIXTURES / "sharded/megatron_legacy_tp2_pp2", tmp_path / f"node{n}") for n in range(2)]
    content = (roots[0] / file).read_bytes()
    (roots[1] / file).write_bytes(content[:-100])
    (one,) = cli("verify", *roots).errors
    assert (one["code"], one["file"]) == ("FS312", str(roots[1] / file))
    (roots[0] / file).write_bytes(content[:-100])
    (one,) = cli("verify", *roots).errors
    assert one["files"] == [str(root / file) for root in roots] and one["effect"]["count"] == 9
