"""ColossalAI's mixtures of experts: files by expert-parallel rank, copies of all else, moments in a row.

The files are laid out as ColossalAI 0.5.0 wrote them (MoeHybridParallelPlugin, ep 2 x pp 2, gloo on CPUs).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fastshard.sources.colossalai.optim import parameter_order
from helpers import assert_refused, cli, edit_safetensors, read_result
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
V, H, F, L, E, EP, PP = 40, 16, 24, 2, 4, 2, 2
CONFIG = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
EMBED = "model.embed_tokens.weight"


def model() -> Tensors:
    torch.manual_seed(3)
    shapes: dict[str, list[int]] = {EMBED: [V, H]}
    for i in range(L):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{p}_proj.weight": [H if p in "qo" else H // 2, H] for p in "qkvo"}
        shapes[f"{at}.block_sparse_moe.gate.weight"] = [E, H]
        for e in range(E):
            expert = f"{at}.block_sparse_moe.experts.{e}"
            shapes |= {
                f"{expert}.w1.weight": [F, H],
                f"{expert}.w2.weight": [H, F],
                f"{expert}.w3.weight": [F, H],
            }
        shapes |= {f"{at}.{norm}_layernorm.weight": [H] for norm in ("input", "post_attention")}
    shapes |= {"model.norm.weight": [H], "lm_head.weight": [V, H]}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def stage_of(name: str) -> int:
    if ".layers." in name:
        return int(name.split(".layers.")[1].split(".")[0]) + 1
    return 1 if name == EMBED else PP


def rank_of(name: str) -> int | None:
    """The expert-parallel rank that has a tensor, from 1; None for what all have."""
    return int(name.split(".experts.")[1].split(".")[0]) // (E // EP) + 1 if ".experts." in name else None


def write(root: Path, tensors: Tensors) -> Path:
    """What MoECheckpointIO.save_sharded_model leaves: the merged index has one of the copies."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(CONFIG))
    weight_map: dict[str, str] = {}
    for stage in range(1, PP + 1):
        for ep in range(1, EP + 1):
            names = [n for n in tensors if stage_of(n) == stage and rank_of(n) in (None, ep)]
            for shard in (1, 2):
                file = f"model-stage-{stage:05d}-{ep:05d}-shard-{shard:05d}.safetensors"
                half = names[: len(names) // 2] if shard == 1 else names[len(names) // 2 :]
                save_file({n: tensors[n].contiguous() for n in half}, root / file, metadata={"format": "pt"})
                weight_map |= dict.fromkeys(half, file)
    index = {"metadata": {"total_size": 0.25}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def optimizer(root: Path, tensors: Tensors) -> Tensors:
    """Optimizer shards: of experts the first rank's files hold none but its own, and moments lie in a row."""
    root.mkdir(parents=True)
    names, want, weight_map = list(tensors), {}, {}
    for stage in range(1, PP + 1):
        for ep in range(1, EP + 1):
            held: dict[int, Any] = {}
            for n, name in enumerate(names):
                if stage_of(name) != stage or rank_of(name) not in ((None, 1) if ep == 1 else (ep,)):
                    continue
                moments = {slot: torch.rand(tensors[name].shape) for slot in ("exp_avg", "exp_avg_sq")}
                want |= {f"{name}.{slot}": t for slot, t in moments.items()}
                flat = {slot: t.reshape(-1) if rank_of(name) else t for slot, t in moments.items()}
                held[n] = {"step": torch.tensor(2.0), **flat}
            file = f"pytorch_optim-stage-{stage:05d}-{ep:05d}-shard-00001.bin"
            torch.save(held, root / file)
            weight_map |= dict.fromkeys(map(str, held), file)
    index = {
        "metadata": {"total_size": 1.5, "param_groups": "pytorch_optim_group.bin"},
        "weight_map": weight_map,
    }
    (root / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
    torch.save([{"lr": 0.01, "params": list(range(len(names)))}], root / "pytorch_optim_group.bin")
    return want


def same(out: Path, want: Tensors) -> None:
    have = read_result(out)
    assert set(have) == set(want)
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())


def test_experts_of_all_ranks(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", model())
    ran = cli("merge", root, tmp_path / "out")
    assert (ran.code, ran.errors) == (0, []), ran.out
    same(tmp_path / "out", model())


def test_moments_of_experts(tmp_path: Path) -> None:
    write(tmp_path / "run/modeling", model())
    want = optimizer(tmp_path / "run/optimizer", model())
    ran = cli("merge", tmp_path / "run", tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    assert not [f for f in ran.findings if f["severity"] != "note"]
    same(tmp_path / "out", model() | want)


def test_copies_that_differ(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", model())
    file = root / "model-stage-00001-00002-shard-00001.safetensors"
    edit_safetensors(file, lambda tensors: tensors[EMBED].add_(1))
    assert_refused(root, tmp_path / "out", "FS302", tensor=EMBED)


@pytest.mark.parametrize(("stage", "ep"), [(1, 1), (2, 2)])
def test_a_ranks_file_is_missing(stage: int, ep: int, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", model())
    file = root / f"model-stage-{stage:05d}-{ep:05d}-shard-00002.safetensors"
    file.unlink()
    rank = f"pp {stage - 1}, ep {ep - 1}"
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file=file.name, rank=rank)


def lose(root: Path, lost: str) -> None:
    """Removes files of a rank, and takes them out of the index, as where its disk was another."""
    for file in root.glob(f"*{lost}*"):
        file.unlink()
    path = root / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if lost not in f}
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("lost", "rank"), [("stage-00001-00001", "pp 0, ep 0"), ("stage-00002-00002", "pp 1, ep 1")]
)
def test_a_rank_that_the_index_lost(lost: str, rank: str, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", model())
    lose(root, lost)
    assert_refused(root, tmp_path / "out", "FS101", exit=3, rank=rank, file=f"{lost}-shard-00001")


def test_the_last_rank_of_all_stages_is_lost(tmp_path: Path) -> None:
    """Names alone show one rank less; the config knows the experts."""
    root = write(tmp_path / "ckpt", model())
    lose(root, "-00002-shard-")
    assert_refused(root, tmp_path / "out", "FS101", exit=3, evidence="experts 2 to 3 of 4", rank="ep 1")


def test_a_padded_embedding_beside_a_whole_head(tmp_path: Path) -> None:
    """Saved without pipeline and experts' ranks: tensor parallelism pads the embedding, and it stays so."""
    root, tensors = tmp_path / "ckpt", model()
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG))
    padded = tensors | {EMBED: torch.cat([tensors[EMBED], torch.zeros(128 - V, H)])}
    save_file(padded, root / "model-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0.25}, "weight_map": dict.fromkeys(padded, "model-00001.safetensors")}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert ran.having("FS212", tensor=EMBED, message="88 rows")
    same(tmp_path / "out", tensors)


def unknown(root: Path, layers: list[str]) -> tuple[Path, Tensors]:
    """A save of a model without a table, whose index alone tells the order of the parameters."""
    tensors = {
        f"{name}.{kind}": torch.rand(4, 4 if kind == "weight" else 1)
        for name in layers
        for kind in ("weight", "bias")
    }
    (root / "modeling").mkdir(parents=True)
    save_file(tensors, root / "modeling/model-00001.safetensors", metadata={"format": "pt"})
    index: dict[str, Any] = {
        "metadata": {"total_size": 0.1},
        "weight_map": dict.fromkeys(tensors, "model-00001.safetensors"),
    }
    (root / "modeling/model.safetensors.index.json").write_text(json.dumps(index))
    (root / "optimizer").mkdir()
    state, want = {}, {}
    for n, (name, t) in enumerate(tensors.items()):
        state[n] = {"step": torch.tensor(2.0), "exp_avg": torch.rand(t.shape)}
        want[f"{name}.exp_avg"] = state[n]["exp_avg"]
    torch.save(state, root / "optimizer/pytorch_optim-00001.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(map(str, state), "pytorch_optim-00001.bin")}
    (root / "optimizer/pytorch_optim.bin.index.json").write_text(json.dumps(index))
    torch.save([{"lr": 0.01, "params": list(state)}], root / "optimizer/pytorch_optim_group.bin")
    return root, tensors | want


def test_the_index_tells_the_order_of_other_models(tmp_path: Path) -> None:
    root, want = unknown(tmp_path / "run", ["h.1.mlp", "h.0.mlp"])
    ran = cli("merge", root, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", want)


def test_moments_of_a_fused_projection_are_refused(tmp_path: Path) -> None:
    """ColossalAI joins them rank by rank, and the projection part by part."""
    root, want = unknown(tmp_path / "run", ["h.0.attn.c_attn"])
    assert_refused(root, tmp_path / "out", "FS514", exit=2, options=("--optimizer",), tensor="c_attn.weight")
    assert cli("merge", root, tmp_path / "out").code == 0
    same(tmp_path / "out", {n: t for n, t in want.items() if "exp_avg" not in n})


def test_the_order_is_that_of_named_parameters() -> None:
    """Of transformers 4.51, the newest that ColossalAI takes; 5 has experts in one tensor."""
    order = parameter_order("mixtral", set(model()), L, False, E)
    assert order == list(model())
    config = transformers.AutoConfig.for_model(**{k: v for k, v in CONFIG.items() if k != "architectures"})
    with torch.device("meta"):
        theirs = [n for n, _ in transformers.AutoModelForCausalLM.from_config(config).named_parameters()]
    assert [n for n in theirs if n in set(order)] == [n for n in order if n in set(theirs)]
