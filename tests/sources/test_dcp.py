"""torch.distributed.checkpoint and rank shards of its Hugging Face writer, against what torch itself
gives."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as dcp
from helpers import FIXTURES, HF, assert_refused, cli, copy, flip_bit, read_result, sha256
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from transformers import AutoModelForCausalLM

SHARDED = FIXTURES / "sharded"
FSDP = SHARDED / "dcp_fsdp2"
TP = SHARDED / "dcp_tp_micro"
RANKS = SHARDED / "dcp_hf_rank_sharded_micro/sharded"


def expected(folder: Path) -> dict[str, str]:
    return {n: t["sha256"] for n, t in json.loads((folder / "expected.json").read_text())["tensors"].items()}


def hashes(out: Path) -> dict[str, str]:
    return {name: sha256(tensor) for name, tensor in read_result(out).items()}


def change_metadata(root: Path, change: Any) -> None:
    """Loads, changes and saves `.metadata` with torch's own classes."""
    path = root / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("folder", [FSDP, TP], ids=lambda p: p.name)
def test_chunks_are_merged(folder: Path, tmp_path: Path) -> None:
    assert cli("verify", folder).code == 0
    assert cli("merge", folder, tmp_path / "out").code == 0
    assert hashes(tmp_path / "out") == expected(folder)


def test_rank_shards_are_merged(tmp_path: Path) -> None:
    ran = cli("merge", RANKS, tmp_path / "out")
    assert ran.code == 0, ran.out
    # torch's own consolidation writes the 0-d tensor as zero; the shards have it right.
    assert hashes(tmp_path / "out") == expected(RANKS.parent)
    assert "only partly checked" in ran.not_checked


def test_every_kind_of_tensor_that_torch_saves(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "bits": torch.tensor([True, False]),
        "long": torch.arange(6).reshape(2, 3),
        "half": torch.randn(5, 7).to(torch.float16),
        "view": torch.randn(4, 6).t(),
        "f8": torch.randn(3, 3).to(torch.float8_e4m3fn),
    }
    state = {"model": tensors, "step": 7, "note": "text"}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    assert set(have) == {f"model.{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert sha256(have[f"model.{name}"]) == sha256(tensor), name
    manifest = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    assert set(manifest["values"]["objects"]) == {"step", "note"}


def test_a_model_is_converted_by_its_config(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")
    config = json.loads((SHARDED / "tp4_micro/config.json").read_text())
    (root / "config.json").write_text(json.dumps(config))
    ran = cli("convert", root, tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.out
    assert hashes(tmp_path / "out") == expected(TP)


def test_a_model_below_a_prefix_is_converted_without_the_optimizer(tmp_path: Path) -> None:
    config = ("--config", SHARDED / "tp4_micro/config.json")
    # The fixture's model has tensors besides that are no Llama's.
    command = ("convert", "--to", "hf", *config)
    assert_refused(FSDP, tmp_path / "refused", "FS207", command=command, tensor="extra.uneven")
    ran = cli("convert", FSDP, tmp_path / "out", "--to", "hf", *config, "--exclude", "extra.*")
    assert ran.code == 0, ran.out
    assert ran.having("FS212", message="under 'model.'")
    wanted = {
        name.removeprefix("model."): value
        for name, value in expected(FSDP).items()
        if name.startswith("model.") and not name.startswith("model.extra.")
    }
    assert hashes(tmp_path / "out") == wanted
    # A merge keeps every tensor; beside a config the model has the names that this is for.
    assert cli("merge", FSDP, tmp_path / "merged", *config).code == 0
    assert hashes(tmp_path / "merged") == {n.removeprefix("model."): v for n, v in expected(FSDP).items()}
    assert cli("merge", FSDP, tmp_path / "plain").code == 0
    assert hashes(tmp_path / "plain") == expected(FSDP)


@pytest.mark.parametrize("tp", [1, 2])
def test_torch_loads_what_is_written(tp: int, tmp_path: Path) -> None:
    want = read_result(HF)
    ran = cli("convert", HF, tmp_path / "dcp", "--to", "dcp", "--tp", tp)
    assert ran.code == 0, ran.out
    assert cli("verify", tmp_path / "dcp").code == 0
    state = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert cli("convert", tmp_path / "dcp", tmp_path / "back", "--to", "hf").code == 0
    back = read_result(tmp_path / "back")
    for have in (state, whole, back):
        assert set(have) == set(want)
        assert all(torch.equal(have[name], tensor) for name, tensor in want.items())
    described = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert len(described["lm_head.weight"].chunks) == tp
    assert len(described["model.norm.weight"].chunks) == 1


def test_a_bit_flipped_in_what_was_written_is_found(tmp_path: Path) -> None:
    assert cli("convert", HF, tmp_path / "dcp", "--to", "dcp").code == 0
    manifest = json.loads((tmp_path / "dcp/fastshard.manifest.json").read_text())
    entry = next(t for t in manifest["tensors"] if t["name"] == "model.norm.weight")
    flip_bit(tmp_path / "dcp" / entry["file"], entry["offset"] + 3)
    ran = cli("verify", tmp_path / "dcp")
    assert ran.code == 1
    assert ran.having("FS301", tensor="model.norm.weight") or ran.having("FS308", tensor="model.norm.weight")


def test_chunks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    assert_refused(HF, tmp_path / "out", "FS204", exit=2, command=("convert", "--to", "dcp", "--tp", "3"))
    assert_refused(HF, tmp_path / "out", "FS515", exit=2, command=("convert", "--to", "dcp", "--pp", "2"))


def test_a_hole_is_named(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")
    name = "model.embed_tokens.weight"

    def drop(metadata: Any) -> None:
        metadata.state_dict_metadata[name].chunks.pop()

    change_metadata(root, drop)
    assert_refused(root, tmp_path / "out", "FS205", tensor=name, message="4000 of 8000")


def test_an_overlap_is_named(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")
    name = "model.embed_tokens.weight"

    def move(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata[name].chunks[1]
        metadata.state_dict_metadata[name].chunks[1] = ChunkStorageMetadata(torch.Size([100, 0]), chunk.sizes)
        for index in list(metadata.storage_data):
            if index.fqn == name and index.offset == torch.Size([125, 0]):
                info = metadata.storage_data.pop(index)
                metadata.storage_data[type(index)(name, torch.Size([100, 0]), 1)] = info

    change_metadata(root, move)
    assert_refused(root, tmp_path / "out", "FS206", tensor=name)


def test_a_chunk_that_leaves_its_tensor_is_named(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")

    def shrink(metadata: Any) -> None:
        metadata.state_dict_metadata["model.norm.weight"].size = torch.Size([31])

    change_metadata(root, shrink)
    assert_refused(root, tmp_path / "out", "FS205", tensor="model.norm.weight")


def test_a_flipped_bit_is_found_by_the_records_checksum(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")
    file = root / "__0_0.distcp"
    flip_bit(file, 4000)
    assert_refused(root, tmp_path / "out", "FS301", file="__0_0.distcp")


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")
    file = root / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-200])
    assert_refused(root, tmp_path / "out", "FS312", file="__1_0.distcp")


def test_a_missing_file_names_its_rank(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")
    (root / "__1_0.distcp").unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file="__1_0.distcp", rank="rank 1")


def test_files_without_metadata_were_not_committed(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")
    (root / ".metadata").unlink()
    assert_refused(root, tmp_path / "out", "FS104", exit=3, file=".metadata")


def test_node_local_files_are_one_checkpoint(tmp_path: Path) -> None:
    first, second = copy(TP, tmp_path / "node0"), tmp_path / "node1"
    second.mkdir()
    (first / "__1_0.distcp").rename(second / "__1_0.distcp")
    ran = cli("merge", first, second, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert hashes(tmp_path / "out") == expected(TP)


def test_metadata_executes_nothing_and_reads_no_other_files(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    (root / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Evil()}))
    ran = cli("merge", root, tmp_path / "out")
    assert (ran.code, marker.exists(), (tmp_path / "out").exists()) == (1, False, False)
    assert ran.having("FS602")
    root = copy(TP, tmp_path / "path")

    def leave(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../../etc/passwd"

    change_metadata(root, leave)
    assert_refused(root, tmp_path / "out", "FS603")


def test_compressed_records_are_refused_by_name(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")

    def compress(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]

    change_metadata(root, compress)
    assert_refused(root, tmp_path / "out", "FS514", exit=2)


def test_a_rank_shard_missing_between_others_is_named(tmp_path: Path) -> None:
    root = copy(RANKS, tmp_path / "ckpt")
    for file in root.glob("shard-00002-*"):
        file.unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file="shard-00002-model-00001", rank="rank 1")


@pytest.mark.parametrize(("left", "ranks"), [(3, "rank 3"), (2, "ranks 2 to 3"), (1, "ranks 1 to 3")])
def test_the_last_rank_shards_missing_show_in_the_shared_axes(left: int, ranks: str, tmp_path: Path) -> None:
    root = copy(RANKS, tmp_path / "ckpt")
    for file in root.glob("shard-*"):
        if int(file.name.split("-")[1]) > left:
            file.unlink()
    ran = assert_refused(
        root, tmp_path / "out", "FS101", exit=3, file=f"shard-0000{left + 1}-model-00001", rank=ranks
    )
    # Nothing else is wrong: tensors that are too short follow from it.
    (told,) = ran.errors
    assert told["effect"]["count"] >= 5
    assert f"only the files of {left} of 4 ranks are present" in told["evidence"]


@pytest.mark.parametrize("rows", [201, 240, 400])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_config_of_another_vocabulary_makes_no_rank_missing(ranks: int, rows: int, tmp_path: Path) -> None:
    state = tiny_models.model("llama", tmp_path / "model").state_dict()
    config = json.loads((tmp_path / "model/config.json").read_text())
    have = len(state["model.embed_tokens.weight"])
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/config.json").write_text(json.dumps(config | {"vocab_size": have + rows}))
    for rank in range(ranks):
        parts = {
            name: t.chunk(ranks)[rank].clone() for name, t in state.items() if rank < len(t.chunk(ranks))
        }
        offsets = {
            name: {"saved_offsets": [rank * len(state[name].chunk(ranks)[0])] + [0] * (t.ndim - 1)}
            for name, t in parts.items()
        }
        told = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(
            parts, tmp_path / f"ranks/shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata=told
        )
    ran = cli("verify", tmp_path / "ranks")
    assert ran.code == 1 and not ran.having("FS101"), ran.out


def test_rank_shards_that_are_too_short_otherwise_accuse_no_rank(tmp_path: Path) -> None:
    root = copy(RANKS, tmp_path / "ckpt")
    (file,) = root.glob("shard-00004-model-00001-*")

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("norm.weight"))
        tensors[name] = tensors[name][:-1]

    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    cut(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, metadata)
    assert_refused(root, tmp_path / "out", "FS201", tensor="norm.weight", expected="[32]", got="[31]")


def saved(folder: Path, fill: float, names: tuple[str, ...] = ("w",), prefix: str = "") -> Path:
    """A small checkpoint of torch's."""
    dcp.save({prefix + name: torch.full((4, 2), fill) for name in names}, checkpoint_id=folder, no_dist=True)
    return folder


def test_directories_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one", 1.0), saved(tmp_path / "two", 2.0)
    assert_refused([one, two], tmp_path / "out", "FS106", exit=2)
    # Copies of one save are one save.
    again = copy(one, tmp_path / "again")
    assert cli("merge", one, again, tmp_path / "out").code == 0


def test_the_newest_step_is_taken_whatever_lies_below_it(tmp_path: Path) -> None:
    for step in (9, 10, 20):
        saved(tmp_path / f"run/checkpoint-{step}/pytorch_model_fsdp_0", float(step))
    for options, value in (((), 20.0), (("--step", "10"), 10.0), (("--step", "checkpoint-9"), 9.0)):
        out = tmp_path / f"out_{value}"
        assert cli("merge", tmp_path / "run", out, *options).code == 0
        assert read_result(out)["w"].unique().item() == value
    assert_refused(tmp_path / "run", tmp_path / "out", "FS501", exit=2, options=("--step", "\u00b2"))


def test_a_model_beside_its_optimizer_is_taken(tmp_path: Path) -> None:
    saved(tmp_path / "run/model", 1.0)
    saved(tmp_path / "run/optim", 2.0, ("state.w.exp_avg",))
    ran = cli("merge", tmp_path / "run", tmp_path / "out")
    assert ran.code == 0 and ran.having("FS108", file="optim", severity="note"), ran.out
    assert set(read_result(tmp_path / "out")) == {"w"}
    saved(tmp_path / "run/other", 3.0)
    assert_refused(tmp_path / "run", tmp_path / "more", "FS106", exit=2, got="model, other")
    # What lies within a checkpoint is not a step of it.
    saved(tmp_path / "outer", 1.0)
    saved(tmp_path / "outer/optim", 2.0, ("state.w.exp_avg",))
    ran = cli("merge", tmp_path / "outer", tmp_path / "inner")
    assert ran.code == 0
    assert ran.having("FS108", file="optim")
    assert set(read_result(tmp_path / "inner")) == {"w"}


def test_records_that_share_bytes_are_refused(tmp_path: Path) -> None:
    root = saved(tmp_path / "ckpt", 1.0, ("a", "b"))

    def change(metadata: Any) -> None:
        first, second = metadata.storage_data.values()
        second.offset, second.length = first.offset, first.length

    change_metadata(root, change)
    assert_refused(root, tmp_path / "out", "FS206", tensor="b")


def test_a_name_like_that_of_a_chunk_is_refused(tmp_path: Path) -> None:
    root = copy(TP, tmp_path / "ckpt")

    def change(metadata: Any) -> None:
        name = "model.embed_tokens.weight"
        other = f"{name}[0,0]"
        metadata.state_dict_metadata[other] = metadata.state_dict_metadata["model.norm.weight"]
        index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == "model.norm.weight")
        del metadata.state_dict_metadata["model.norm.weight"], metadata.storage_data[index]
        metadata.storage_data[type(index)(other, index.offset)] = info

    change_metadata(root, change)
    assert_refused(root, tmp_path / "out", "FS106", exit=2, tensor="[0,0]")


def test_two_copies_of_a_model_are_not_guessed(tmp_path: Path) -> None:
    model = read_result(HF)
    state = {f"{p}.{n}": t for p in ("state_dict", "module") for n, t in model.items()}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "ckpt/config.json").write_bytes((HF / "config.json").read_bytes())
    command = ("convert", "--to", "hf")
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS106", exit=2, command=command, got="module.*")


def test_a_rank_shard_that_is_held_twice_is_compared(tmp_path: Path) -> None:
    root = copy(RANKS, tmp_path / "ckpt")
    names = sorted(p.name for p in root.glob("shard-00002-*"))
    for name in names:
        (root / name.replace("shard-00002", "shard-00003")).write_bytes((root / name).read_bytes())
    assert_refused(root, tmp_path / "out", "FS206", exit=1, file="shard-00003")


@pytest.mark.parametrize("rank", ["00000", "99999999999"])
def test_a_rank_that_torch_does_not_count_is_refused(rank: str, tmp_path: Path) -> None:
    root = copy(RANKS, tmp_path / "ckpt")
    first = next(root.glob("shard-00001-*"))
    (root / first.name.replace("shard-00001", f"shard-{rank}")).write_bytes(first.read_bytes())
    assert_refused(root, tmp_path / "out", "FS106", exit=2, file=f"shard-{rank}")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied", "llama", "qwen2"])
def test_rank_shards_without_a_config_are_no_other_models(kind: str, tmp_path: Path) -> None:
    """Norms of queries and keys tell the size of a head: nothing that is not known may contradict them."""
    state = tiny_models.model(kind, tmp_path / "model").state_dict()
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        parts, offsets = {}, {}
        for name, tensor in state.items():
            if name == "lm_head.weight" and kind.endswith("tied"):
                continue
            parts[name] = tensor.chunk(2)[rank].clone()
            offsets[name] = {"saved_offsets": [rank * len(tensor.chunk(2)[0])] + [0] * (tensor.ndim - 1)}
        told = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(
            parts, tmp_path / f"ranks/shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata=told
        )
    ran = cli("merge", tmp_path / "ranks", tmp_path / "out")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    assert all(torch.equal(tensor, state[name]) for name, tensor in have.items())
    (tmp_path / "ranks/shard-00002-model-00001-of-00001.safetensors").unlink()
    lost = cli("verify", tmp_path / "ranks")
    assert lost.code == 3 and [(f["code"], f["rank"]) for f in lost.errors] == [("FS101", "rank 1")], lost.out


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_tied", "llama"])
def test_a_model_loads_what_is_written_as_it_is(kind: str, tmp_path: Path) -> None:
    """The plain way: its own state dict, in which a tied head has a name too."""
    of = tiny_models.model(kind, tmp_path / "model")
    assert cli("convert", tmp_path / "model", tmp_path / "dcp", "--to", "dcp").code == 0
    other = AutoModelForCausalLM.from_config(of.config)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    other.load_state_dict(state)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(other.eval()(tokens).logits, of(tokens).logits)
    assert cli("convert", tmp_path / "dcp", tmp_path / "back", "--to", "hf").code == 0
    assert set(read_result(tmp_path / "back")) == set(read_result(tmp_path / "model"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stacked_experts_are_those_of_a_model_in_memory(tmp_path: Path) -> None:
    """transformers 5 stacks experts when it loads them, version 4 and files have them one by one: either is
    written."""
    of = tiny_models.model("mixtral", tmp_path / "model")
    names = {name for name in of.state_dict() if "experts" in name}
    assert all(name.endswith(("gate_up_proj", "down_proj")) for name in names)
    ran = cli("convert", tmp_path / "model", tmp_path / "stacked", "--to", "dcp", "--stacked-experts")
    assert ran.code == 0, ran.out
    other = AutoModelForCausalLM.from_config(of.config)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "stacked")
    assert all(torch.equal(tensor, of.state_dict()[name]) for name, tensor in state.items())
    assert cli("convert", tmp_path / "model", tmp_path / "apart", "--to", "dcp").code == 0
    described = dcp.FileSystemReader(tmp_path / "apart").read_metadata().state_dict_metadata
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in described
    for form in ("stacked", "apart"):
        assert cli("convert", tmp_path / form, tmp_path / f"{form}-back", "--to", "hf").code == 0
        have, want = read_result(tmp_path / f"{form}-back"), read_result(tmp_path / "model")
        assert set(have) == set(want) and all(torch.equal(have[n], want[n]) for n in want)
    tiny_models.model("llama", tmp_path / "dense")
    for to in ("dcp", "dcp:torchtitan"):
        ran = cli("convert", tmp_path / "dense", tmp_path / "out", "--to", to, "--stacked-experts")
        assert ran.code == 2 and ran.errors[0]["code"] == "FS515", ran.out
