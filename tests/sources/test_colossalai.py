"""ColossalAI's sharded directories: stages, indexes, slices saved as the whole, optimizer shards by
number."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fastshard.sources.colossalai.optim import parameter_order
from helpers import FIXTURES, assert_refused, cli, copy, edit_safetensors, read_result
from safetensors.torch import load_file, save_file

REAL = FIXTURES / "sharded/colossalai_049_tp2_pp2/modeling"
INDEX = "model.safetensors.index.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def whole() -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(REAL.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(out: Path, want: dict[str, torch.Tensor]) -> None:
    have = read_result(out)
    assert set(have) == set(want)
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype
        assert torch.equal(have[name], tensor), name


def stage_of(name: str) -> int:
    layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else None
    return (1 if int(layer) < 2 else 2) if layer else (1 if "embed" in name else 2)


def write(
    root: Path, tensors: dict[str, torch.Tensor], form: str = "safetensors", stages: bool = True
) -> Path:
    """What save_model(shard=True) writes, two shards per stage, indexes of stages left as they are."""
    root.mkdir()
    shutil.copy(REAL / "config.json", root / "config.json")
    stem, index = (
        ("model", "model.safetensors") if form == "safetensors" else ("pytorch_model", "pytorch_model.bin")
    )
    merged: dict[str, Any] = {"metadata": {"total_size": 0.0}, "weight_map": {}}
    for stage in (1, 2) if stages else (0,):
        part: dict[str, Any] = {"metadata": {"total_size": 0.0}, "weight_map": {}}
        names = [n for n in tensors if not stages or stage_of(n) == stage]
        for shard in (1, 2):
            where = f"-stage-{stage:05d}-shard" if stages else ""
            held = {n: tensors[n].contiguous() for n in names[shard - 1 :: 2]}
            file = root / f"{stem}{where}-{shard:05d}.{form}"
            save_file(held, file, metadata={"format": "pt"}) if form == "safetensors" else torch.save(
                held, file
            )
            part["weight_map"] |= dict.fromkeys(held, file.name)
            part["metadata"]["total_size"] += sum(t.nbytes for t in held.values()) / 1024 / 1024
        if stages:
            (root / "tmp_index_files").mkdir(exist_ok=True)
            (root / f"tmp_index_files/{index}.index-stage-{stage:05d}.json").write_text(json.dumps(part))
        merged["weight_map"] |= part["weight_map"]
        merged["metadata"]["total_size"] += part["metadata"]["total_size"]
    (root / f"{index}.index.json").write_text(json.dumps(merged))
    return root


def finished(root: Path) -> Path:
    shutil.rmtree(root / "tmp_index_files")
    return root


@pytest.mark.parametrize("stages", [True, False])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_both_forms_with_and_without_stages(form: str, stages: bool, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", whole(), form, stages)
    ran = cli("merge", finished(root) if stages else root, tmp_path / "out", "-v")
    assert ran.code == 0, ran.out
    assert [f["severity"] for f in ran.having("FS108")] == ["note"], "total_size in MB is no fault"
    same(tmp_path / "out", whole())


def test_the_real_save(tmp_path: Path) -> None:
    assert cli("inspect", REAL).doc["framework"] == "ColossalAI"
    assert cli("convert", REAL, tmp_path / "out", "--to", "hf").code == 0
    same(tmp_path / "out", whole())


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stages_file_is_missing(stage: int, tmp_path: Path) -> None:
    root = finished(write(tmp_path / "ckpt", whole()))
    name = f"model-stage-{stage:05d}-shard-00002.safetensors"
    (root / name).unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file=name, rank=f"pp {stage - 1}")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_that_the_index_lost(stage: int, tmp_path: Path) -> None:
    """Rank 0 merges the indexes that it finds on its disk: the other stage is on another one."""
    here, there = write(tmp_path / "here", whole()), write(tmp_path / "there", whole())
    index = json.loads((here / INDEX).read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f"stage-{stage:05d}" not in f}
    (here / INDEX).write_text(json.dumps(index))
    finished(here)
    for node, lost in ((here, stage), (there, 3 - stage)):
        for file in node.glob(f"model-stage-{lost:05d}*"):
            file.unlink()
    (there / f"tmp_index_files/{INDEX.removesuffix('.json')}-stage-{3 - stage:05d}.json").unlink()
    (there / INDEX).unlink()
    (there / "config.json").unlink()
    out = tmp_path / "out"
    assert_refused(
        here, out, "FS101", exit=3, rank=f"pp {stage - 1}", file=f"model-stage-{stage:05d}-shard-00001"
    )
    # Without its index, but with its files.
    ran = cli("merge", here, there, out)
    assert ran.code == 0, ran.out
    same(out, whole())
    shutil.rmtree(there / "tmp_index_files")
    ran = cli("merge", here, there, tmp_path / "out2")
    assert ran.code == 0, ran.out
    assert ran.having("FS108", severity="warning", file=f"stage-{stage:05d}")
    same(tmp_path / "out2", whole())


def test_indexes_that_were_never_merged(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", whole())
    (root / INDEX).unlink()
    assert_refused(root, tmp_path / "out", "FS104", exit=3, got="2 stages")
    ran = cli("merge", root, tmp_path / "out", "--accept", "uncommitted")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", whole())


def test_no_index_at_all(tmp_path: Path) -> None:
    root = finished(write(tmp_path / "ckpt", whole()))
    (root / INDEX).unlink()
    assert_refused(root, tmp_path / "out", "FS104", exit=3)
    assert cli("merge", root, tmp_path / "out", "--accept", "uncommitted").code == 0
    same(tmp_path / "out", whole())


def test_files_of_an_older_save_are_not_read(tmp_path: Path) -> None:
    root = finished(write(tmp_path / "ckpt", whole()))
    shutil.copy(
        root / "model-stage-00001-shard-00001.safetensors", root / "model-stage-00001-shard-00003.safetensors"
    )
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0
    assert ran.having("FS108", file="shard-00003", severity="warning")


def test_leaked_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    leaked = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(4) for i in range(4)}
    leaked["model.rotary_emb.inv_freq"] = torch.rand(4)
    root = finished(write(tmp_path / "ckpt", whole() | leaked))
    ran = cli("merge", root, tmp_path / "out", "-v")
    assert ran.code == 0, ran.out
    assert len({f["tensor"] for f in ran.having("FS212", tensor="inv_freq")}) == 5
    same(tmp_path / "out", whole())


def test_the_newer_of_two_steps_is_taken(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"run/epoch-0_step-{step}").mkdir(parents=True)
        shutil.copytree(REAL, tmp_path / f"run/epoch-0_step-{step}/modeling")
    for options, taken in ((("--step", "10"), 10), ((), 20)):
        ran = cli("inspect", tmp_path / "run", *options)
        assert ran.doc["step"] == f"epoch-0_step-{taken}"
    (tmp_path / "run/epoch-0_step-20").rename(tmp_path / "run/best")
    assert_refused(tmp_path / "run", tmp_path / "out", "FS106", exit=2)


SLICED = [
    (EMBED, 0),
    (HEAD, 0),
    ("model.layers.1.self_attn.k_proj.weight", 0),
    ("model.layers.2.mlp.down_proj.weight", 1),
    ("model.layers.0.self_attn.o_proj.weight", 1),
]


def slices(tensor: torch.Tensor, name: str, dim: int, tp: int) -> list[torch.Tensor]:
    if name in (EMBED, HEAD):
        rows = -(-tensor.shape[0] // (64 * tp)) * 64 * tp
        tensor = torch.cat([tensor, torch.zeros(rows - tensor.shape[0], tensor.shape[1], dtype=tensor.dtype)])
    return list(tensor.chunk(tp, dim))


def ranks(tmp_path: Path, sliced: list[tuple[str, int]], tp: int = 4) -> list[Path]:
    roots = []
    for rank in range(tp):
        tensors = whole()
        for name, dim in sliced:
            tensors[name] = slices(tensors[name], name, dim, tp)[rank]
        roots.append(finished(write(tmp_path / f"tp{rank}", tensors)))
    return roots


@pytest.mark.parametrize(("name", "dim"), SLICED)
def test_a_slice_saved_as_the_whole(name: str, dim: int, tmp_path: Path) -> None:
    (root, *_) = ranks(tmp_path, [(name, dim)])
    ran = assert_refused(root, tmp_path / "out", "FS208", tensor=name)
    (finding,) = ran.having("FS208")
    assert finding["message"].startswith("1 of 4") and ("rows", "columns")[dim] in finding["message"]
    arithmetic = "4 x 256 = 1024 = 1000 padded to a multiple of " if name in (EMBED, HEAD) else "4 x "
    assert arithmetic in finding["evidence"]


@pytest.mark.parametrize(
    "sliced", [[s] for s in SLICED] + [SLICED[:2], SLICED], ids=lambda s: f"{len(s)} {s[0][0]}"
)
def test_slices_of_all_ranks_are_merged_and_trimmed(sliced: list[tuple[str, int]], tmp_path: Path) -> None:
    roots = ranks(tmp_path, sliced)
    ran = cli("merge", *roots, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert ran.having("FS109", severity="warning", message=f"{len(sliced)} tensors")
    same(tmp_path / "out", whole())


def test_slices_of_some_ranks_are_not_enough(tmp_path: Path) -> None:
    roots = ranks(tmp_path, SLICED[:2])
    assert_refused(roots[:3], tmp_path / "out", "FS101", expected="4 ranks", got="3")


def test_one_ranks_directory_given_twice(tmp_path: Path) -> None:
    roots = ranks(tmp_path, SLICED[:1])
    assert_refused([roots[0], roots[1], roots[1], roots[3]], tmp_path / "out", "FS303", file="tp1")


def test_one_ranks_slice_is_a_copy_by_its_checksum(tmp_path: Path) -> None:
    parts = slices(whole()[EMBED], EMBED, 0, 4)
    parts[2] = parts[1]
    roots = [
        finished(write(tmp_path / f"tp{r}", whole() | {EMBED: part.clone()}, "bin"))
        for r, part in enumerate(parts)
    ]
    assert_refused(roots, tmp_path / "out", "FS303", tensor=EMBED, rank="tp 2")


def test_what_every_rank_holds_whole_is_compared(tmp_path: Path) -> None:
    roots = ranks(tmp_path, SLICED[:1])
    index = json.loads((roots[2] / INDEX).read_text())
    file = roots[2] / index["weight_map"]["model.norm.weight"]
    edit_safetensors(file, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert_refused(roots, tmp_path / "out", "FS302", tensor="model.norm.weight")


# --- optimizer ---


def order() -> list[str]:
    """Parameters in the order of a real model's own."""
    config = transformers.AutoConfig.from_pretrained(REAL)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return [name for name, _ in model.named_parameters()]


def optimizer(root: Path, form: str, groups: list[list[str]] | None = None) -> dict[str, torch.Tensor]:
    """Optimizer shards as ColossalAI writes them; what a merge must give."""
    root.mkdir(parents=True)
    tensors = whole()
    groups = groups or [order()]
    numbers = {name: n for n, name in enumerate(name for group in groups for name in group)}
    want = {}
    index: dict[str, Any] = {
        "metadata": {"total_size": 1.5, "param_groups": "pytorch_optim_group.bin"},
        "weight_map": {},
    }
    shards: list[dict[int, dict[str, torch.Tensor]]] = [{}, {}]
    for name, n in numbers.items():
        state = {s: torch.rand(tensors[name].shape) for s in ("exp_avg", "exp_avg_sq")}
        want |= {f"{name}.{s}": t for s, t in state.items()}
        shards[n % 2][n] = {"step": torch.tensor(7.0), **state}
    for i, shard in enumerate(shards):
        if form == "bin":
            file = f"pytorch_optim-{i + 1:05d}.bin"
            torch.save(shard, root / file)
            index["weight_map"] |= {str(n): file for n in shard}
        else:
            file = f"optimizer-{i + 1:05d}.safetensors"
            flat, objects = {}, []
            for n, state in shard.items():
                for slot, value in state.items():
                    if slot == "step":
                        objects.append(f"state.{n}.step")
                        value = torch.frombuffer(bytearray(pickle.dumps(7)), dtype=torch.uint8)
                    flat[f"state.{n}.{slot}"] = value
            save_file(flat, root / file, metadata={"format": "pt", "non_tensor_keys": json.dumps(objects)})
            index["weight_map"] |= {str(n): file for n in shard}
    name = "pytorch_optim.bin.index.json" if form == "bin" else "optimizer.safetensors.index.json"
    (root / name).write_text(json.dumps(index))
    saved = [{"lr": 1e-4, "betas": (0.9, 0.95), "params": [numbers[n] for n in group]} for group in groups]
    torch.save(saved, root / "pytorch_optim_group.bin")
    return want


@pytest.fixture
def run(tmp_path: Path) -> Path:
    copy(REAL, tmp_path / "run/modeling")
    return tmp_path / "run"


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_moments_get_their_parameters_names(form: str, run: Path, tmp_path: Path) -> None:
    want = optimizer(run / "optimizer", form)
    ran = cli("merge", run, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", whole() | want)
    assert cli("merge", run, tmp_path / "out2").code == 0
    same(tmp_path / "out2", whole())
    assert cli("merge", run / "modeling", run / "optimizer", tmp_path / "out3", "--optimizer").code == 0
    same(tmp_path / "out3", whole() | want)


def test_groups_with_and_without_weight_decay(run: Path, tmp_path: Path) -> None:
    names = order()
    norms = [n for n in names if "norm" in n]
    want = optimizer(run / "optimizer", "bin", [[n for n in names if n not in norms], norms])
    ran = cli("merge", run, tmp_path / "out", "--optimizer")
    # Shapes decide that norms are of the second group, and the order within each does the rest.
    assert ran.code == 0, ran.out
    same(tmp_path / "out", whole() | want)


def test_a_moment_that_does_not_fit_its_parameter(run: Path, tmp_path: Path) -> None:
    optimizer(run / "optimizer", "bin")
    file = run / "optimizer/pytorch_optim-00001.bin"
    shard = torch.load(file)
    shard[2]["exp_avg"] = shard[2]["exp_avg"][:16]
    torch.save(shard, file)
    ran = assert_refused(run, tmp_path / "out", "FS201", options=("--optimizer",), file=file.name)
    (finding,) = ran.having("FS201")
    assert finding["tensor"] == "model.layers.0.self_attn.k_proj.weight"
    assert finding["message"] == "exp_avg of parameter 2 and the parameter differ in shape"
    assert cli("merge", run, tmp_path / "out").code == 0, "the parameters alone are whole"


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("pytorch_optim-00002.bin", "FS101"),
        ("pytorch_optim_group.bin", "FS101"),
        ("pytorch_optim.bin.index.json", "FS104"),
    ],
)
def test_a_missing_file_of_the_optimizer(file: str, code: str, run: Path, tmp_path: Path) -> None:
    optimizer(run / "optimizer", "bin")
    (run / "optimizer" / file).unlink()
    assert_refused(run, tmp_path / "out", code, exit=3, options=("--optimizer",))
    ran = cli("merge", run, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert ran.having(code, severity="warning")


def test_states_of_a_stage_are_missing(run: Path, tmp_path: Path) -> None:
    optimizer(run / "optimizer", "bin")
    file = run / "optimizer/pytorch_optim-00001.bin"
    shard = torch.load(file)
    del shard[4]
    torch.save(shard, file)
    assert_refused(
        run,
        tmp_path / "out",
        "FS102",
        exit=3,
        options=("--optimizer",),
        tensor="model.layers.0.self_attn.o_proj.weight",
    )


def test_an_unknown_kind_of_state_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    optimizer(run / "optimizer", "bin")
    file = run / "optimizer/pytorch_optim-00001.bin"
    shard = torch.load(file)
    shard[0]["exp_avg_sq_row"] = torch.rand(3)
    torch.save(shard, file)
    ran = assert_refused(run, tmp_path / "out", "FS514", exit=2, options=("--optimizer",))
    assert "exp_avg_sq_row" in ran.having("FS514")[0]["message"]


def test_an_order_that_is_not_known_is_refused(run: Path, tmp_path: Path) -> None:
    optimizer(run / "optimizer", "bin")
    config = json.loads((run / "modeling/config.json").read_text()) | {"model_type": "bloom"}
    (run / "modeling/config.json").write_text(json.dumps(config))
    assert_refused(run, tmp_path / "out", "FS402", exit=2, options=("--optimizer",))
    assert cli("merge", run, tmp_path / "out").code == 0


def test_there_are_no_masters_to_take(run: Path, tmp_path: Path) -> None:
    optimizer(run / "optimizer", "bin")
    assert_refused(run, tmp_path / "out", "FS402", exit=2, options=("--weights", "masters"))


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 4}),
        ("gpt_neox", {}),
    ],
)
def test_the_order_is_that_of_named_parameters(kind: str, options: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **SMALL, **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = set(model.state_dict()) - {n for n, _ in model.named_buffers()}
    tied = bool(options.get("tie_word_embeddings", getattr(config, "tie_word_embeddings", False)))
    family = "gpt_neox" if kind == "gpt_neox" else "llama"
    assert parameter_order(family, names, 2, tied) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("stages", [False, True])
def test_names_alone_prove_nothing_of_shapes(stages: bool, form: str, tmp_path: Path) -> None:
    """A rank's slices of the vocabulary that were saved as wholes: without a config nothing tells."""
    tensors = whole()
    rows = len(tensors[EMBED])
    root = write(tmp_path / "ckpt", tensors, form, stages)
    assert "only partly checked" not in cli("merge", root, tmp_path / "proven").not_checked
    for name, sliced in (("whole", False), ("sliced", True)):
        cut = {n: t[: rows // 2] if sliced and n in (EMBED, HEAD) else t for n, t in tensors.items()}
        ckpt = write(tmp_path / name, cut, form, stages)
        (ckpt / "config.json").unlink()
        shutil.rmtree(ckpt / "tmp_index_files", ignore_errors=True)
        for verb in (("verify", ckpt), ("merge", ckpt, tmp_path / f"{name}-out")):
            assert "completeness is only partly checked" in cli(*verb).not_checked, (name, verb[0])


def test_slices_that_are_views_of_one_storage_are_no_copies(tmp_path: Path) -> None:
    """torch.save keeps the whole storage of a slice: two ranks' files hold the same one, and other parts of
    it."""
    tensors = whole()
    for rank in range(2):
        cut = {}
        for name, tensor in tensors.items():
            dim = 0 if name in (EMBED, HEAD) or name.endswith(("q_proj.weight", "up_proj.weight")) else None
            cut[name] = tensor if dim is None else tensor.chunk(2, dim)[rank]
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        shutil.copy(REAL / "config.json", folder)
        torch.save(cut, folder / "pytorch_model-00001.bin")
        index = {"metadata": {}, "weight_map": dict.fromkeys(cut, "pytorch_model-00001.bin")}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    roots = [tmp_path / "rank0", tmp_path / "rank1"]
    ran = cli("merge", *roots, tmp_path / "out")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", tensors)
    # A slice that was copied is one all the same.
    shutil.copy(roots[0] / "pytorch_model-00001.bin", roots[1])
    ran = cli("merge", *roots, tmp_path / "copied")
    assert ran.code == 1 and ran.having("FS303"), ran.out


def test_a_value_head_stands_in_the_place_of_the_output_layer(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in whole().items() if name != HEAD}
    tensors["value_head.weight"] = torch.randn(1, tensors[EMBED].shape[1]).to(torch.bfloat16)
    root = write(tmp_path / "ckpt", tensors, stages=False)
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0 and ran.having("FS212", tensor="value_head.weight"), ran.out
    same(tmp_path / "out", tensors)
    # Without one the output layer is missing.
    del tensors["value_head.weight"]
    ran = cli("merge", write(tmp_path / "lost", tensors, stages=False), tmp_path / "none")
    assert ran.code == 3 and ran.having("FS102", tensor=HEAD), ran.out
