"""Models without a table: what their own layers and their config tell of what must exist, and that good ones
are left alone."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import dtensor_maker
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import zero_maker as maker
from fastshard.expected.heuristics import ShapeDtype, judge
from helpers import assert_refused, cli, edit_safetensors
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto

Tensors = dict[str, ShapeDtype]
#: Auto classes, the one that most models are saved as first.
KINDS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "SPEECH_SEQ_2_SEQ",
    "PRETRAINING",
)
#: Sizes of models with hundreds of experts, which are no different with fewer.
FEWER = {"n_routed_experts": 16, "num_experts": 16, "num_local_experts": 16, "moe_num_experts": 16}


def class_of(kind: type[Any]) -> type[Any] | None:
    """What a config's models are saved as."""
    for name in (*(f"MODEL_FOR_{k}_MAPPING" for k in KINDS), "MODEL_MAPPING"):
        mapping = getattr(modeling_auto, name, {})
        with contextlib.suppress(KeyError, ImportError, ValueError):
            found = mapping[kind]
            return found[0] if isinstance(found, tuple) else found
    return None


def saved(config: Any, kind: type[Any]) -> tuple[Tensors, dict[str, Any]]:
    """Names and shapes of a model as ``save_pretrained`` would write them, and its config.json."""
    with torch.device("meta"):
        model = kind(config)
    tied, ignored = model.all_tied_weights_keys or {}, set(model._keys_to_ignore_on_save or ())
    state = {n: t for n, t in model.state_dict().items() if n not in tied and n not in ignored}
    state = revert_weight_conversion(model, state)
    said = json.loads(config.to_json_string()) | {"architectures": [kind.__name__]}
    return {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in state.items()}, said


def families(names: list[str]) -> Iterator[tuple[str, Tensors, dict[str, Any]]]:
    """Every model of transformers that can be made of a default config."""
    for name in names:
        config_class = transformers.CONFIG_MAPPING[name]
        kind = class_of(config_class)
        for sizes in (FEWER, {}):
            try:
                config = config_class(**{k: v for k, v in sizes.items() if hasattr(config_class(), k)})
                made = None if kind is None else saved(config, kind)
            except Exception:
                # It needs what is not installed, or an argument that has no default.
                continue
            if made is not None:
                yield name, *made
            break


def wrong(tensors: Tensors, config: dict[str, Any] | None) -> list[str]:
    return [f"{f.severity} {f.code} {f.tensor}: {f.message}" for f in judge(tensors, config).findings]


#: One of each kind that layers alternate in, or that has stacks of its own.
SOME = [
    "t5",
    "modernbert",
    "whisper",
    "jamba",
    "gemma3n_text",
    "openelm",
    "stablelm",
    "glm4_moe",
    "dots3_note",
    "encodec",
    "pvt_v2",
    "dory",
    "fastspeech2_conformer",
    "deepseek_v4",
    "nemotron_h",
    "mllama",
    "swin",
    "zamba2",
    "moshi",
]


def test_good_models_are_left_alone() -> None:
    """A few families whose layers differ from each other on purpose."""
    names = [name for name in SOME if name in transformers.CONFIG_MAPPING]
    seen = 0
    for name, tensors, config in families(names):
        assert wrong(tensors, config) == [] and wrong(tensors, None) == [], name
        seen += 1
    assert seen >= 12


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_family_of_transformers_is_accused() -> None:
    accused, seen = {}, 0
    for name, tensors, config in families(sorted(transformers.CONFIG_MAPPING)):
        seen += 1
        if found := [*wrong(tensors, config), *wrong(tensors, None)]:
            accused[name] = found[:3]
    assert accused == {}
    assert seen > 400


@cache
def stablelm() -> tuple[Tensors, dict[str, Any]]:
    config = transformers.StableLmConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_qkv_bias=True,
    )
    return saved(config, transformers.StableLmForCausalLM)


@cache
def mixture() -> tuple[Tensors, dict[str, Any]]:
    config = transformers.Glm4MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    return saved(config, transformers.Glm4MoeForCausalLM)


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: held for n, held in tensors.items() if not any(part in n for part in parts)}


def shaped(name: str, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: (change(tensors[name][0]), tensors[name][1])}


def half(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0] // 2, *shape[1:]


def turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1]


LAYER, LAST = "model.layers.3.", "model.layers.5."
DAMAGE: dict[str, tuple[Any, Callable[[Tensors], Tensors], str, str]] = {
    "a matrix": (stablelm, without(f"{LAYER}self_attn.q_proj.weight"), "error", "FS102"),
    "a bias": (stablelm, without(f"{LAYER}self_attn.q_proj.bias"), "error", "FS102"),
    "a module": (stablelm, without(f"{LAYER}self_attn.k_proj"), "error", "FS102"),
    "a norm": (stablelm, without(f"{LAYER}input_layernorm"), "error", "FS102"),
    "a block, which may be meant": (
        stablelm,
        without(f"{LAYER}self_attn", f"{LAYER}input_layernorm"),
        "warning",
        "FS102",
    ),
    "a layer between": (stablelm, without(LAYER), "error", "FS103"),
    "the last layer, which the config alone counts": (stablelm, without(LAST), "warning", "FS103"),
    "the first layers": (stablelm, without("layers.0.", "layers.1."), "error", "FS103"),
    "the output layer": (stablelm, without("lm_head"), "error", "FS102"),
    "the embedding": (stablelm, without("embed_tokens"), "error", "FS102"),
    "half a matrix": (stablelm, shaped(f"{LAYER}mlp.up_proj.weight", half), "error", "FS208"),
    "a matrix turned": (stablelm, shaped(f"{LAYER}mlp.up_proj.weight", turned), "error", "FS201"),
    "another matrix": (
        stablelm,
        shaped(f"{LAYER}mlp.up_proj.weight", lambda s: (s[0] + 3, s[1])),
        "error",
        "FS201",
    ),
    "half the embedding": (stablelm, shaped("model.embed_tokens.weight", half), "error", "FS208"),
    "half the columns of it": (
        stablelm,
        shaped("model.embed_tokens.weight", lambda s: (s[0], 33)),
        "none",
        "",
    ),
    "a slice of its columns": (
        stablelm,
        shaped("lm_head.weight", lambda s: (s[0], s[1] // 4)),
        "error",
        "FS208",
    ),
    "the embedding turned": (stablelm, shaped("model.embed_tokens.weight", turned), "error", "FS201"),
    "rows gone": (stablelm, shaped("lm_head.weight", lambda s: (s[0] - 9, s[1])), "error", "FS215"),
    "rows more, padded": (stablelm, shaped("lm_head.weight", lambda s: (s[0] + 64, s[1])), "none", ""),
    "rows more": (stablelm, shaped("lm_head.weight", lambda s: (s[0] + 9, s[1])), "warning", "FS215"),
    "an expert's matrix": (mixture, without(f"{LAYER}mlp.experts.5.up_proj"), "error", "FS102"),
    "an expert": (mixture, without(f"{LAYER}mlp.experts.5."), "error", "FS102"),
    "an expert of all layers": (mixture, without("experts.5."), "error", "FS102"),
    "a rank's experts": (mixture, without(*(f"experts.{i}." for i in range(4, 8))), "error", "FS102"),
    "a rank's experts, and the routers": (
        mixture,
        without("mlp.gate", *(f"experts.{i}." for i in range(4, 8))),
        "warning",
        "FS102",
    ),
    "a router": (mixture, without(f"{LAYER}mlp.gate.weight"), "error", "FS102"),
    "a matrix of the dense layer": (mixture, without("layers.0.self_attn.o_proj"), "error", "FS102"),
    "the final norm, which nothing tells of": (stablelm, without("model.norm"), "none", ""),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_found(case: str) -> None:
    model, damage, severity, code = DAMAGE[case]
    tensors, config = model()
    assert wrong(tensors, config) == []
    found = judge(damage(tensors), config).findings
    worst = next((s for s in ("error", "warning") if any(f.severity == s for f in found)), "none")
    assert worst == severity, found
    assert not code or any(f.code == code and f.severity == severity for f in found)


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_found_of_a_model_in_several_files(case: str) -> None:
    """One of them may be lost: what the config alone counts is an error there, and all else is as in one
    file."""
    model, damage, severity, code = DAMAGE[case]
    tensors, config = model()
    by_config_alone = case in (
        "the last layer, which the config alone counts",
        "a rank's experts, and the routers",
    )
    found = judge(damage(tensors), config, in_files=True).findings
    worst = next((s for s in ("error", "warning") if any(f.severity == s for f in found)), "none")
    assert worst == ("error" if by_config_alone else severity), found
    assert not code or any(f.code == code and f.severity == worst for f in found)


def in_parts(tensors: Tensors, config: dict[str, Any], *kinds: str) -> dict[str, Any]:
    """A config that lists attention and MLP of each block as layers of their own."""
    blocks = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    return config | {
        "model_type": "of_next_week",
        "num_hidden_layers": blocks * len(kinds),
        "layer_types": list(kinds) * blocks,
    }


@pytest.mark.parametrize("in_files", [False, True])
def test_a_family_that_counts_the_parts_of_its_blocks_is_not_accused(in_files: bool) -> None:
    tensors, config = stablelm()
    config = in_parts(tensors, config, "full_attention", "mlp")
    assert judge(tensors, config, in_files=in_files).findings == []
    # And a block that is lost is one still.
    (lost,) = judge(without(LAST)(tensors), config, in_files=in_files).findings
    assert (lost.code, lost.severity) == ("FS103", "error" if in_files else "warning")
    assert any(f.code == "FS103" for f in judge(without(LAYER)(tensors), config, in_files=in_files).findings)
    # Where blocks hold one part each, as the config says, half of them are not all.
    halves = {
        name: held
        for name, held in tensors.items()
        if not name.startswith("model.layers.") or "mlp" in name or "post_attention_layernorm" in name
    }
    (lost,) = judge(halves, config, in_files=in_files).findings
    assert (lost.code, lost.tensor) == ("FS103", "model.layers.6")


def test_a_family_that_nobody_knows_is_not_accused_for_how_it_counts(folder: Path, tmp_path: Path) -> None:
    """A number that the config alone contradicts is a warning; the same of a checkpoint in several files may
    be a lost one."""
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "of_next_week",
        "num_hidden_layers": 9,
    }
    (folder / "config.json").write_text(json.dumps(config))
    ran = cli("verify", folder)
    assert ran.code == 0 and not ran.errors
    assert [(f["severity"], f["tensor"]) for f in ran.having("FS103")] == [("warning", "model.layers.6")]
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    parts = {f"model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in parts.items():
        save_file(
            {name: tensors[name] for name in held}, tmp_path / "shards" / file, metadata={"format": "pt"}
        )
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "shards/model.safetensors.index.json").write_text(json.dumps(index))
    assert cli("verify", tmp_path / "shards").having("FS103", severity="error", tensor="model.layers.6")


def test_most_of_what_repeats_is_guarded() -> None:
    """Single tensors that are gone, halved or turned, of layers that repeat: all are found."""
    rng = random.Random(5)
    for tensors, config in (stablelm(), mixture()):
        alone = set(judge(tensors, config).alone)
        for name in rng.sample(sorted(tensors), 30):
            if name in alone or ".0." in name or ".5." in name:
                continue
            assert wrong(without(name)(tensors), config), name
            shape = tensors[name][0]
            if len(shape) == 2:
                assert wrong(shaped(name, half)(tensors), config), name
                assert shape == shape[::-1] or wrong(shaped(name, turned)(tensors), config), name


def test_sizes_that_are_meant_to_differ() -> None:
    """A search that chose other sizes for a layer, or none of its attention, has chosen consistently."""
    tensors, config = stablelm()
    narrow = dict(tensors)
    for name, change in {
        "gate_proj": half,
        "up_proj": half,
        "down_proj": lambda s: (s[0], s[1] // 2),
    }.items():
        narrow = shaped(f"{LAYER}mlp.{name}.weight", change)(narrow)
    assert {f.severity for f in judge(narrow, config).findings} == {"warning"}
    quantised = without(f"{LAYER}mlp.up_proj.weight")(tensors) | {
        f"{LAYER}mlp.up_proj.{part}": ((4, 4), "int32") for part in ("qweight", "qzeros", "scales")
    }
    assert not any(f.severity == "error" and f.code != "FS102" for f in judge(quantised, config).findings)


def test_the_trained_part_of_a_model_is_no_broken_one() -> None:
    """Runs with frozen parameters save the others alone."""
    tensors, config = stablelm()
    part = without("embed_tokens", "lm_head", "model.norm", "layers.0.", "layers.1.")(tensors)
    assert {f.severity for f in judge(part, config, saved_whole=False).findings} == {"warning"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors, config = stablelm()
    torch.manual_seed(4)
    made = {name: torch.randn(shape) for name, (shape, _) in tensors.items()}
    (tmp_path / "ckpt").mkdir()
    save_file(made, tmp_path / "ckpt/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "ckpt/config.json").write_text(json.dumps(config))
    return tmp_path / "ckpt"


def test_runs_are_refused_by_it(folder: Path, tmp_path: Path) -> None:
    good = cli("verify", folder)
    assert good.code == 0 and not any(f["severity"] != "note" for f in good.findings)
    assert "tensors were compared with other layers" in good.having("FS109")[0]["message"]
    name = f"{LAYER}self_attn.q_proj.weight"
    edit_safetensors(folder / "model.safetensors", lambda tensors: tensors.pop(name))
    assert_refused(folder, tmp_path / "out", "FS102", exit=3, tensor=name)
    # What was left out on purpose is not missed, and what was asked for alone misses nothing.
    assert cli("merge", folder, tmp_path / "out", "--exclude", "*.q_proj.weight").code == 0
    assert cli("merge", folder, tmp_path / "some", "--include", "*norm*").code == 0


def as_dcp(tensors: dict[str, torch.Tensor], root: Path) -> None:
    dcp.save(tensors, checkpoint_id=root, no_dist=True)


def as_bin(tensors: dict[str, torch.Tensor], root: Path) -> None:
    root.mkdir()
    torch.save(tensors, root / "pytorch_model.bin")


def as_trainer(tensors: dict[str, torch.Tensor], root: Path) -> None:
    root.mkdir()
    torch.save(
        {"state_dict": {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}},
        root / "pytorch_model.bin",
    )


def as_zero(stage: int) -> Callable[[dict[str, torch.Tensor], Path], None]:
    return lambda tensors, root: void(maker.write(root, maker.Run(stage, 2, torch.bfloat16, [tensors])))


def as_ranks(tensors: dict[str, torch.Tensor], root: Path) -> None:
    root.mkdir()
    dtensor_maker.rank_files(root, tensors, 2)


def void(_: object) -> None:
    """Nothing."""


#: Ways in which a model is saved whose names are those of transformers.
FORMS = {
    "dcp": as_dcp,
    "ranks": as_ranks,
    "bin": as_bin,
    "trainer": as_trainer,
    "zero2": as_zero(2),
    "zero3": as_zero(3),
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_it_was_saved_as(form: str, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    lacking, turned_over = f"{LAYER}self_attn.q_proj.weight", f"{LAYER}mlp.up_proj.weight"
    for damage, code in ((None, None), (lacking, "FS102"), (turned_over, "FS201")):
        have = dict(tensors)
        if damage == lacking:
            del have[lacking]
        elif damage == turned_over:
            have[turned_over] = have[turned_over].T.contiguous()
        root = tmp_path / f"{form}{code}"
        FORMS[form](have, root)
        shutil.copy(folder / "config.json", root / "config.json")
        ran = cli("verify", root)
        if code is None:
            assert ran.code == 0, ran.findings
        else:
            assert [f["code"] for f in ran.errors] == [code], ran.findings
            assert str(damage) in ran.errors[0]["tensor"]


def test_one_of_several_files_is_a_part_and_nothing_worse(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    files = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(files) > 2
    for file in files:
        ran = cli("inspect", file)
        assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS118"], ran.findings
        ran = cli("inspect", file, "--accept", "part")
        assert ran.code == 0 and not ran.errors and ran.having("FS109"), ran.findings
