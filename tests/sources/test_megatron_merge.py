"""Megatron-LM checkpoints of models that no table describes: merged by what the files themselves prove, or
refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused, cli, edit_pt, read_result
from megatron_optimizer_maker import SLOTS, Run, Tensors, legacy, torch_dist, wanted, write_dcp

State = dict[str, torch.Tensor]


def drawn(shapes: dict[str, list[int]]) -> State:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def cut(tensor: torch.Tensor, dimension: int, ranks: int = 2) -> tuple[list[int], list[Any]]:
    """Shape, and a chunk for each rank along a dimension."""
    each = tensor.shape[dimension] // ranks
    starts = [[rank * each if d == dimension else 0 for d in range(tensor.dim())] for rank in range(ranks)]
    return list(tensor.shape), list(zip(starts, tensor.chunk(ranks, dimension), strict=True))


#: Layers, hidden size and MLP of the models below.
L, H, F = 2, 16, 24
_BLOCK: dict[str, tuple[list[int], int]] = {
    "self_attention.linear_qkv.weight": ([48, H], 0),
    "self_attention.linear_qkv.layer_norm_weight": ([H], 0),
    "self_attention.linear_proj.weight": ([H, H], 1),
}
_DENSE = {
    "mlp.linear_fc1.weight": ([2 * F, H], 0),
    "mlp.linear_fc1.layer_norm_weight": ([H], 0),
    "mlp.linear_fc2.weight": ([H, F], 1),
}
_PLAIN = _DENSE | {"mlp.linear_fc1.weight": ([F, H], 0)}
_EXPERTS = {
    "pre_mlp_layernorm.weight": ([H], 0),
    "mlp.router.weight": ([4, H], 0),
    "mlp.experts.experts.linear_fc1.weight": ([4, 2 * F, H], 0),
    "mlp.experts.experts.linear_fc2.weight": ([4, H, F], 0),
}
_SHARED = {
    "mlp.shared_experts.linear_fc1.weight": ([2 * F, H], 0),
    "mlp.shared_experts.linear_fc2.weight": ([H, F], 1),
    "mlp.shared_experts.gate_weight": ([1, H], 1),
}
_BIASES = {
    "self_attention.linear_qkv.bias": ([48], 0),
    "self_attention.linear_qkv.layer_norm_bias": ([H], 0),
    "self_attention.linear_proj.bias": ([H], 0),
    "mlp.linear_fc1.bias": ([F], 0),
    "mlp.linear_fc1.layer_norm_bias": ([H], 0),
    "mlp.linear_fc2.bias": ([H], 0),
}
_ENDS = {
    "embedding.word_embeddings.weight": ([64, H], 0),
    "decoder.final_layernorm.weight": ([H], 0),
    "output_layer.weight": ([64, H], 0),
}
_POSITIONS = {"embedding.position_embeddings.weight": ([32, H], 0), "decoder.final_layernorm.bias": ([H], 0)}


def stacked(
    block: dict[str, tuple[list[int], int]], top: str = "decoder"
) -> dict[str, tuple[list[int], int]]:
    return {f"{top}.layers.{name}": ([L, *shape], d + 1) for name, (shape, d) in block.items()}


def numbered(*blocks: dict[str, tuple[list[int], int]]) -> dict[str, tuple[list[int], int]]:
    return {
        f"decoder.layers.{n}.{name}": entry for n, block in enumerate(blocks) for name, entry in block.items()
    }


MODELS: dict[str, dict[str, tuple[list[int], int]]] = {
    "gpt3": {**_ENDS, **_POSITIONS, **stacked(_BLOCK | _PLAIN | _BIASES)},
    "gpt3_rope": {**_ENDS, "decoder.final_layernorm.bias": ([H], 0), **stacked(_BLOCK | _PLAIN | _BIASES)},
    "mtp": {
        **_ENDS,
        **stacked(_BLOCK | _DENSE),
        "mtp.layers.0.enorm.weight": ([H], 0),
        "mtp.layers.0.eh_proj.weight": ([H, 2 * H], 0),
        **{f"mtp.layers.0.transformer_layer.{name}": entry for name, entry in (_BLOCK | _DENSE).items()},
    },
    "shared_experts": {**_ENDS, **stacked(_BLOCK | _EXPERTS | _SHARED)},
    "dense_first": {**_ENDS, **numbered(_BLOCK | _DENSE, _BLOCK | _EXPERTS)},
    "biased_experts": {
        **_ENDS,
        **stacked(_BLOCK | _EXPERTS | {"mlp.experts.experts.linear_fc1.bias": ([4, 2 * F], 0)}),
    },
    "value_head": {**_ENDS, "output_layer.weight": ([1, H], 1), **stacked(_BLOCK | _DENSE)},
    "no_head": {**{n: e for n, e in _ENDS.items() if "output" not in n}, **stacked(_BLOCK | _DENSE)},
    "no_embedding": {**{n: e for n, e in _ENDS.items() if "embed" not in n}, **stacked(_BLOCK | _DENSE)},
    "wider_layer": {
        **_ENDS,
        **numbered(_BLOCK | _DENSE, _BLOCK | _DENSE | {"mlp.linear_fc2.weight": ([H, 2 * F], 1)}),
    },
    "layer_without_mlp": {**_ENDS, **numbered(_BLOCK | _DENSE, _BLOCK)},
    "vision": {
        "conv1.weight": ([H, 3, 4, 4], 0),
        "ln_pre.weight": ([H], 0),
        **stacked(_BLOCK | _PLAIN | _BIASES),
    },
    "bert": {
        "embedding.tokentype_embeddings.weight": ([2, H], 0),
        "lm_head.dense.weight": ([H, H], 0),
        **_ENDS,
        **stacked(_BLOCK | _PLAIN | _BIASES, "encoder"),
    },
    "hybrid": {**_ENDS, **numbered({"mixer.in_proj.weight": ([40, H], 0), "mixer.A_log": ([4], 0)}, _BLOCK)},
    "wrapped": {f"module.{name}": entry for name, entry in {**_ENDS, **stacked(_BLOCK | _DENSE)}.items()},
}


#: What a table describes, if the arguments tell of heads.
DESCRIBED = ("gpt3_rope", "no_head", "wrapped")


def saved(
    root: Path, entries: dict[str, tuple[list[int], int]], args: dict[str, Any] | None, *, today: bool = False
) -> State:
    """A torch_dist checkpoint of two ranks; ``today`` is the form since core 0.19, with the common state
    among the records."""
    folder = root / "iter_0000010"
    whole = drawn({name: shape for name, (shape, _) in entries.items()})
    tensors: Tensors = {
        name: cut(whole[name], dimension)
        for name, (_, dimension) in entries.items()
        if whole[name].shape[dimension] > 1
    }
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 10}
    if args is not None:
        common["args"] = Run().arguments(**args)
    objects = {"common_state/shard_0_1": [common]} if today else {}
    write_dcp(folder, tensors, objects)
    if not today:
        torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return whole


def same(out: Path, want: State) -> None:
    have = read_result(out)
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), name


def words_of(name: str) -> dict[str, Any]:
    """Arguments of a model."""
    known: dict[str, Any] = {
        "hidden_size": H,
        "ffn_hidden_size": F,
        "num_query_groups": 4,
        "kv_channels": 4,
        "padded_vocab_size": 64,
    }
    if "experts" in name or name == "dense_first":
        known |= {"num_experts": 4, "moe_ffn_hidden_size": F}
    if name in ("gpt3", "gpt3_rope", "vision", "bert"):
        known |= {"swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True}
    if name == "gpt3":
        known |= {"position_embedding_type": "learned_absolute"}
    return known


@pytest.mark.parametrize("form", ["common.pt", "common_state", "without arguments"])
@pytest.mark.parametrize("name", MODELS)
def test_any_model_is_merged_as_metadata_has_it(name: str, form: str, tmp_path: Path) -> None:
    args = None if form == "without arguments" else words_of(name)
    whole = saved(tmp_path / "ckpt", MODELS[name], args, today=form == "common_state")
    for verb in ("verify", "inspect"):
        assert cli(verb, tmp_path / "ckpt").code == 0
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", whole)
    if name not in DESCRIBED or args is None:
        # NeMo has the prefix of wrapped names, and its settings in a file beside.
        code, exit_code = ("FS101", 3) if name == "wrapped" else ("FS514", 2)
        for target in ("hf", "megatron", "gpt_neox", "dcp"):
            assert_refused(
                tmp_path / "ckpt", tmp_path / "hf", code, exit=exit_code, command=("convert", "--to", target)
            )
    rows = {n for n in whole if n.endswith(("word_embeddings.weight", "output_layer.weight"))}
    if rows and name != "value_head":
        assert cli("merge", tmp_path / "ckpt", tmp_path / "less", "--vocab-size", 60).code == 0
        same(tmp_path / "less", {n: t[:60] if n in rows else t for n, t in whole.items()})


def of_rank(
    whole: torch.Tensor, name: str, dimension: int, rank: int, degree: int, gated: bool
) -> torch.Tensor:
    """A rank's share: of a gated first projection one of each half."""
    if dimension < 0:
        return whole
    halves = whole.chunk(2, 0) if gated and ".linear_fc1." in f".{name}" and "norm" not in name else [whole]
    return torch.cat([half.chunk(degree, dimension)[rank] for half in halves], dimension).clone()


def alike(entry: dict[str, tuple[list[int], int]]) -> dict[str, tuple[list[int], int]]:
    """The same tensors as ranks divide them: those of one dimension and more that each rank has whole."""
    return {
        name: (shape, -1 if re.search(_WHOLE, name) else dimension)
        for name, (shape, dimension) in entry.items()
    }


_WHOLE = r"norm|router|position_embeddings|gate_weight|linear_proj.bias|linear_fc2.bias|tokentype|\.extra\."


def rank_files(
    root: Path,
    entries: dict[str, tuple[list[int], int]],
    args: dict[str, Any],
    *,
    tp: int = 2,
    pp: int = 1,
    gated: bool = True,
) -> State:
    """Rank files of a run; layers are numbered from the first of each stage."""
    entries = alike(entries)
    whole = drawn({name: shape for name, (shape, _) in entries.items()})
    layers = 1 + max(int(m[1]) for name in entries if (m := re.match(r"decoder\.layers\.(\d+)", name)))
    for rank in range(tp):
        for stage in range(pp):
            model = {}
            for name, (_, dimension) in entries.items():
                own, match = name, re.match(r"(decoder\.layers\.)(\d+)(.*)", name)
                if match:
                    if int(match[2]) // (layers // pp) != stage:
                        continue
                    own = f"{match[1]}{int(match[2]) - stage * (layers // pp)}{match[3]}"
                elif stage != (0 if "embedding" in name else pp - 1):
                    continue
                model[own] = of_rank(whole[name], name, dimension, rank, tp, gated)
            known = {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "num_layers": layers,
            }
            folder = root / "iter_0000010" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            folder.mkdir(parents=True)
            content = {
                "args": Run(tp=tp).arguments(**args, **known),
                "checkpoint_version": 3.0,
                "iteration": 10,
            }
            torch.save({**content, "model": model}, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return whole


RANKS: dict[str, tuple[dict[str, tuple[list[int], int]], dict[str, Any]]] = {
    "gpt3": (
        {**_ENDS, **_POSITIONS, **numbered(_BLOCK | _PLAIN | _BIASES, _BLOCK | _PLAIN | _BIASES)},
        words_of("gpt3"),
    ),
    "mtp": (
        {n: e for n, e in MODELS["mtp"].items() if not n.startswith("decoder.layers")}
        | numbered(_BLOCK | _DENSE, _BLOCK | _DENSE),
        {**words_of("mtp"), "mtp_num_layers": 1},
    ),
    "one_group": (
        {
            **_ENDS,
            **numbered(
                _BLOCK | _DENSE | {"self_attention.linear_qkv.weight": ([24, H], 0)},
                _BLOCK | _DENSE | {"self_attention.linear_qkv.weight": ([24, H], 0)},
            ),
        },
        {**words_of("mtp"), "num_query_groups": 1},
    ),
    "output_gate": (
        {
            **_ENDS,
            **numbered(
                _BLOCK | _DENSE | {"self_attention.linear_qkv.weight": ([64, H], 0)},
                _BLOCK | _DENSE | {"self_attention.linear_qkv.weight": ([64, H], 0)},
            ),
        },
        {**words_of("mtp"), "attention_output_gate": True},
    ),
}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("name", RANKS)
def test_rank_files_are_merged_by_names_and_arguments(name: str, pp: int, tmp_path: Path) -> None:
    entries, args = RANKS[name]
    whole = rank_files(tmp_path / "ckpt", entries, args, pp=pp, gated=args.get("swiglu", True))
    assert cli("verify", tmp_path / "ckpt").code == 0
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", whole)
    if name != "one_group":
        assert_refused(tmp_path / "ckpt", tmp_path / "hf", "FS514", exit=2, command=("convert", "--to", "hf"))


def rank_file(root: Path, rank: int) -> Path:
    return root / f"iter_0000010/mp_rank_{rank:02d}/model_optim_rng.pt"


def gpt3(root: Path, **more: Any) -> State:
    entries, args = RANKS["gpt3"]
    return rank_files(root, entries, {**args, **more}, gated=False)


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    gpt3(tmp_path / "ckpt")
    rank_file(tmp_path / "ckpt", 1).unlink()
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS101", exit=3, file="mp_rank_01")


def test_a_copied_rank_is_named(tmp_path: Path) -> None:
    gpt3(tmp_path / "ckpt")
    rank_file(tmp_path / "ckpt", 1).write_bytes(rank_file(tmp_path / "ckpt", 0).read_bytes())
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS303", file="mp_rank_0")


def test_copies_that_differ_are_named(tmp_path: Path) -> None:
    gpt3(tmp_path / "ckpt")

    def change(content: dict[str, Any]) -> None:
        content["model"]["embedding.position_embeddings.weight"][3, 2] += 1

    edit_pt(rank_file(tmp_path / "ckpt", 1), change)
    assert_refused(
        tmp_path / "ckpt", tmp_path / "out", "FS302", tensor="embedding.position_embeddings.weight"
    )


def test_a_tensor_that_one_rank_lacks_is_named(tmp_path: Path) -> None:
    gpt3(tmp_path / "ckpt")
    name = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    edit_pt(rank_file(tmp_path / "ckpt", 1), lambda content: content["model"].pop(name))
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS102", exit=3, tensor=name, rank="tp 1")


def test_a_layer_that_all_ranks_lack_is_named(tmp_path: Path) -> None:
    gpt3(tmp_path / "ckpt")

    def shorter(content: dict[str, Any]) -> None:
        content["model"] = {n: t for n, t in content["model"].items() if "layers.1." not in n}

    for rank in range(2):
        edit_pt(rank_file(tmp_path / "ckpt", rank), shorter)
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS102", exit=3, tensor="decoder.layers.1")


@pytest.mark.parametrize(
    "change", [{"ffn_hidden_size": 48}, {"swiglu": True}, {"kv_channels": 8}, {"padded_vocab_size": 128}]
)
def test_arguments_of_another_model_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    gpt3(tmp_path / "ckpt", **change)
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS514", exit=2, message="uncertain how ranks divide")


@pytest.mark.parametrize(
    ("key", "value"), [("mtp_num_layers", 1), ("moe_shared_expert_intermediate_size", 8)]
)
def test_what_the_arguments_call_for_must_be_there(key: str, value: int, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    if key == "mtp_num_layers":
        gpt3(root, mtp_num_layers=value)
    else:
        entries = {**_ENDS, **_POSITIONS, **numbered(_BLOCK | _SEQUENTIAL)}
        rank_files(root, entries, {**words_of("experts"), key: value}, tp=1)
    assert_refused(root, tmp_path / "out", "FS514", exit=2, message=key)


_SEQUENTIAL = {"pre_mlp_layernorm.weight": ([H], 0), "mlp.router.weight": ([4, H], 0)} | {
    f"mlp.experts.local_experts.{e}.{name}": entry
    for e in range(4)
    for name, entry in (("linear_fc1.weight", ([2 * F, H], 0)), ("linear_fc2.weight", ([H, F], 1)))
}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_module_that_nothing_is_known_of_is_whole_on_one_rank(tp: int, tmp_path: Path) -> None:
    entries, args = RANKS["gpt3"]
    entries = {**entries, "decoder.layers.0.mixer.in_proj.weight": ([16, H], 0)}
    whole = rank_files(tmp_path / "ckpt", entries, args, tp=tp, gated=False)
    if tp == 1:
        assert cli("merge", tmp_path / "ckpt", tmp_path / "out").code == 0
        same(tmp_path / "out", whole)
        return
    assert_refused(
        tmp_path / "ckpt", tmp_path / "out", "FS514", exit=2, tensor="decoder.layers.0.mixer.in_proj.weight"
    )


def test_experts_that_fewer_ranks_divide(tmp_path: Path) -> None:
    """tp 4, experts over 2 x 2 ranks: rank r has the files of tp r, and of experts the pair r // 2, half r %
    2."""
    entries = alike({**_ENDS, **numbered(_BLOCK | _SEQUENTIAL, _BLOCK | _SEQUENTIAL)})
    whole = drawn({name: shape for name, (shape, _) in entries.items()})
    words = {
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "tensor_model_parallel_size": 4,
        "num_layers": 2,
    }
    for rank in range(4):
        model = {}
        for name, (_, dimension) in entries.items():
            if match := re.match(r"(.*local_experts\.)(\d)(.*)", name):
                if int(match[2]) // 2 == rank // 2:
                    model[f"{match[1]}{int(match[2]) % 2}{match[3]}"] = of_rank(
                        whole[name], name, dimension, rank % 2, 2, True
                    )
            else:
                model[name] = of_rank(whole[name], name, dimension, rank, 4, True)
        folder = tmp_path / f"ckpt/iter_0000010/mp_rank_{rank:02d}_{rank // 2:03d}"
        folder.mkdir(parents=True)
        content = {
            "args": Run(tp=4).arguments(**words_of("experts"), **words),
            "checkpoint_version": 3.0,
            "iteration": 10,
        }
        torch.save({**content, "model": model}, folder / "model_optim_rng.pt")
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", whole)
    aside = tmp_path / "aside.pt"
    lost = tmp_path / "ckpt/iter_0000010/mp_rank_02_001/model_optim_rng.pt"
    lost.rename(aside)
    assert_refused(tmp_path / "ckpt", tmp_path / "lost", "FS101", exit=3, file="mp_rank_02_001")
    aside.rename(lost)
    # Gates between other rows: no half of a rank's rows is the gates.
    for file in (tmp_path / "ckpt").rglob("*.pt"):
        edit_pt(file, lambda c: setattr(c["args"], "moe_mlp_glu_interleave_size", 4))
    assert_refused(tmp_path / "ckpt", tmp_path / "glu", "FS514", exit=2)


@pytest.mark.parametrize("tp", [1, 2])
def test_names_of_before_core(tp: int, tmp_path: Path) -> None:
    """GPT-2 as Megatron-LM saved it: nested dicts, of a language model and its encoder."""
    shapes = {
        "embedding.word_embeddings.weight": ([64, H], 0),
        "embedding.position_embeddings.weight": ([32, H], -1),
        "encoder.layers.0.input_layernorm.weight": ([H], -1),
        "encoder.layers.0.self_attention.query_key_value.weight": ([48, H], 0),
        "encoder.layers.0.self_attention.query_key_value.bias": ([48], 0),
        "encoder.layers.0.self_attention.dense.weight": ([H, H], 1),
        "encoder.layers.0.self_attention.dense.bias": ([H], -1),
        "encoder.layers.0.mlp.dense_h_to_4h.weight": ([F, H], 0),
        "encoder.layers.0.mlp.dense_h_to_4h.bias": ([F], 0),
        "encoder.layers.0.mlp.dense_4h_to_h.weight": ([H, F], 1),
        "encoder.layers.0.mlp.dense_4h_to_h.bias": ([H], -1),
        "encoder.final_layernorm.weight": ([H], -1),
    }
    whole = drawn({name: shape for name, (shape, _) in shapes.items()})
    for rank in range(tp):
        own = {
            name: of_rank(whole[name], name, dimension, rank, tp, False)
            for name, (_, dimension) in shapes.items()
        }
        below = {n.removeprefix("encoder."): t for n, t in own.items() if n.startswith("encoder.")}
        embedding: dict[str, Any] = {}
        for name, tensor in own.items():
            if name.startswith("embedding."):
                embedding[name.split(".")[1]] = {"weight": tensor}
        content = {
            "args": Run(tp=tp).arguments(**words_of("gpt3"), num_layers=1),
            "checkpoint_version": 3.0,
            "iteration": 10,
        }
        folder = tmp_path / f"ckpt/iter_0000010/mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        model = {"language_model": {"embedding": embedding, "encoder": below}}
        torch.save({**content, "model": model}, folder / "model_optim_rng.pt")
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", {f"language_model.{name}": tensor for name, tensor in whole.items()})
    # Without a version its rows are in the order of version 0, part by part.
    for file in (tmp_path / "ckpt").rglob("*.pt"):
        edit_pt(file, lambda c: c.pop("checkpoint_version"))
    if tp > 1:
        assert_refused(tmp_path / "ckpt", tmp_path / "old", "FS514", exit=2, message="old versions")
    else:
        assert cli("merge", tmp_path / "ckpt", tmp_path / "old").code == 0


def test_a_further_layer_that_is_used_again(tmp_path: Path) -> None:
    """mtp_use_repeated_layer: several predictions, one layer."""
    entries, args = RANKS["mtp"]
    words = {**args, "mtp_num_layers": 3, "mtp_use_repeated_layer": True}
    whole = rank_files(tmp_path / "ckpt", entries, words)
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", whole)


def test_what_megatron_fsdp_saves_is_merged_under_its_names(tmp_path: Path) -> None:
    shapes = {
        "embedding.word_embeddings.weight": [64, H],
        "decoder.layers.0.mlp.linear_fc1.weight_w": [F, H],
        "decoder.layers.0.mlp.linear_fc1.weight_v": [F, H],
        "decoder.layers.0.mlp.linear_fc2.weight": [H, F],
    }
    whole = drawn({f"model.module.{name}": shape for name, shape in shapes.items()})
    whole |= drawn({f"optimizer.state.module.{name}.exp_avg": shape for name, shape in shapes.items()})
    objects = {
        "args": Run().arguments(ckpt_format="fsdp_dtensor"),
        "iteration": 10,
        "checkpoint_version": 3.0,
    }
    folder = tmp_path / "ckpt/iter_0000010"
    write_dcp(folder, {name: cut(tensor, 0) for name, tensor in whole.items()}, objects)
    assert cli("inspect", tmp_path / "ckpt").doc["framework"] == "Megatron-LM (fsdp_dtensor)"
    assert cli("verify", tmp_path / "ckpt").code == 0
    assert cli("merge", tmp_path / "ckpt", tmp_path / "out").code == 0
    same(tmp_path / "out", whole)
    assert cli("merge", tmp_path / "ckpt", tmp_path / "less", "--vocab-size", 60).code == 0
    same(tmp_path / "less", {n: t[:60] if "word_embeddings" in n else t for n, t in whole.items()})
    for target in ("hf", "megatron"):
        assert_refused(
            tmp_path / "ckpt",
            tmp_path / "hf",
            "FS514",
            exit=2,
            command=("convert", "--to", target),
            message="ckpt_format",
            got="fsdp_dtensor",
        )


@pytest.mark.parametrize("form", ["fully_reshardable", "dp_reshardable", "fully_sharded_model_space"])
def test_optimizers_of_models_without_a_table(form: str, tmp_path: Path) -> None:
    """By parameter they are read; flat buffers, whose order the model gives, are refused and the weights are
    not."""
    run = Run(tp=2)
    norm = torch.ones(32)
    further: Tensors = {"mtp.layers.0.enorm.weight": ([32], [([0], norm.bfloat16())])}
    if form == "fully_reshardable":
        further |= {
            f"optimizer.state.{kind}.mtp.layers.0.enorm.weight": ([32], [([0], norm)])
            for kind in ("param", *SLOTS)
        }
    root = torch_dist(tmp_path / "ckpt", run, form, **further)
    flat = form == "dp_reshardable"
    assert cli("verify", root).code == 0
    assert cli("merge", root, tmp_path / "weights").code == 0
    have = read_result(tmp_path / "weights")
    assert have.keys() == {"mtp.layers.0.enorm.weight", *wanted(run, optimizer=False)}
    if flat:
        assert_refused(root, tmp_path / "all", "FS402", exit=2, command=("merge", "--optimizer"))
        return
    for masters in (False, True):
        out = tmp_path / f"all_{masters}"
        flags = ("--weights", "masters") if masters else ()
        assert cli("merge", root, out, "--optimizer", *flags).code == 0
        have = read_result(out)
        assert all(torch.equal(have[name], tensor) for name, tensor in wanted(run, masters=masters).items())
        assert ("mtp.layers.0.enorm.weight.exp_avg" in have) == (form == "fully_reshardable")


@pytest.mark.parametrize("distributed", [True, False])
def test_optimizers_beside_rank_files_without_a_table(distributed: bool, tmp_path: Path) -> None:
    root = legacy(tmp_path / "ckpt", Run(tp=2), distributed)
    for rank in range(2):
        edit_pt(
            rank_file(root, rank),
            lambda c: c["model"].update({"embedding.position_embeddings.weight": torch.ones(8, 32)}),
        )
    assert cli("verify", root).code == 0
    assert cli("merge", root, tmp_path / "weights").code == 0
    assert "embedding.position_embeddings.weight" in read_result(tmp_path / "weights")
    for flags in (("--optimizer",), ("--weights", "masters")):
        assert_refused(root, tmp_path / "all", "FS402", exit=2, command=("merge", *flags))


def test_a_lost_common_part_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", MODELS["gpt3"], words_of("gpt3"))
    (tmp_path / "ckpt/iter_0000010/common.pt").unlink()
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS101", exit=3, file="common.pt")


@pytest.mark.parametrize("number", ["999999999", "9" * 5000])
def test_a_layer_that_counts_further_than_any_model(number: str, tmp_path: Path) -> None:
    gpt3(tmp_path / "ckpt")
    for rank in range(2):
        edit_pt(
            rank_file(tmp_path / "ckpt", rank),
            lambda c: c["model"].update({f"mtp.layers.{number}.enorm.weight": torch.ones(H)}),
        )
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code in (1, 2, 3)
    assert ran.findings
