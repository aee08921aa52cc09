"""torchtitan's names of gpt-oss, both ways.

The tensors are laid out by hand (``names_maker.titan_gpt_oss``). Where torchtitan is installed, its own model
computes what is written, and its own adapter gives the same tensors.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fastshard
import gpt_oss_maker
import moe_maker
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from fastshard.layouts import tables
from helpers import assert_refused, cli, read_result
from names_maker import titan_gpt_oss
from safetensors.torch import load_file, save_file
from test_spellings import equal, loaded

KINDS: dict[str, dict[str, Any]] = {
    "yarn": {},
    # What the class means that a config leaves out.
    "its own rope": {"rope_parameters": None},
    "default rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "tied": {"tie_word_embeddings": True, "num_hidden_layers": 3},
}


@cache
def files(kind: str) -> tuple[dict[str, torch.Tensor], str, torch.Tensor]:
    """The tensors that transformers saves, the text of config.json, and the logits."""
    made = gpt_oss_maker.model(**KINDS[kind])
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        return tensors, (Path(folder) / "config.json").read_text(), moe_maker.logits(made)


def hf(kind: str, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    tensors, config, _ = files(kind)
    (folder / "config.json").write_text(json.dumps(json.loads(config) | changes))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def titan(kind: str, folder: Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    """torchtitan's checkpoint, with the model's config.json beside it."""
    dcp.save(titan_gpt_oss(files(kind)[0]) if state is None else state, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(files(kind)[1])
    return folder


def logits(folder: Path) -> torch.Tensor:
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return moe_maker.logits(made.eval())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_as_torchtitan_lays_it_out(kind: str, tp: int, tmp_path: Path) -> None:
    ran = cli("convert", hf(kind, tmp_path / "hf"), tmp_path / "out", "--to", "dcp:torchtitan", "--tp", tp)
    assert ran.code == 0, ran.out
    want = titan_gpt_oss(files(kind)[0])
    if kind == "tied":
        # A state dict has a tied head under its own name too.
        want["lm_head.weight"] = want["tok_embeddings.weight"]
    equal(loaded(tmp_path / "out"), want)
    assert cli("convert", tmp_path / "out", tmp_path / "back", "--to", "hf").code == 0
    have = read_result(tmp_path / "back")
    equal({name: have[name] for name in have if name in files(kind)[0]}, files(kind)[0])
    assert torch.equal(logits(tmp_path / "back"), files(kind)[2])


@pytest.mark.parametrize("age", [0, 1, 2])
def test_names_of_every_age_are_read(age: int, tmp_path: Path) -> None:
    state = titan_gpt_oss(files("yarn")[0], age=age)
    assert cli("convert", titan("yarn", tmp_path / "in", state), tmp_path / "back", "--to", "hf").code == 0
    equal(read_result(tmp_path / "back"), files("yarn")[0])
    # A merge keeps the names that it finds.
    assert cli("merge", tmp_path / "in", tmp_path / "merged").code == 0
    equal(read_result(tmp_path / "merged"), state)


def test_experts_in_mxfp4_have_their_values(tmp_path: Path) -> None:
    want = gpt_oss_maker.save_mxfp4(tmp_path / "hf")
    command = ("convert", "--to", "dcp:torchtitan")
    refused = assert_refused(tmp_path / "hf", tmp_path / "no", "FS514", exit=2, command=command)
    assert "--dtype bf16" in json.dumps(refused.errors)
    for to, out in (("hf", "values"), ("dcp:torchtitan", "titan")):
        ran = cli("convert", tmp_path / "hf", tmp_path / out, "--to", to, "--dtype", "bf16")
        assert ran.code == 0, ran.out
    equal(read_result(tmp_path / "values"), want)
    equal(loaded(tmp_path / "titan"), titan_gpt_oss(want))
    assert cli("convert", tmp_path / "titan", tmp_path / "back", "--to", "hf").code == 0
    equal(read_result(tmp_path / "back"), want)
    assert torch.equal(logits(tmp_path / "back"), logits(tmp_path / "values"))


@pytest.mark.parametrize("lost", ["blocks", "scales"])
def test_a_part_of_a_weight_in_mxfp4_that_is_lost_is_named(lost: str, tmp_path: Path) -> None:
    gpt_oss_maker.save_mxfp4(tmp_path / "hf")
    file, name = tmp_path / "hf/model.safetensors", f"model.layers.1.mlp.experts.down_proj_{lost}"
    save_file({n: t for n, t in load_file(file).items() if n != name}, file, {"format": "pt"})
    for to in ("hf", "dcp:torchtitan"):
        ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", to, "--dtype", "bf16")
        assert ran.code == 3 and "model.layers.1.mlp.experts.down_proj" in json.dumps(ran.errors), ran.out


def test_every_lost_tensor_is_named(tmp_path: Path) -> None:
    state = titan_gpt_oss(files("tied")[0])
    state["lm_head.weight"] = state["tok_embeddings.weight"]
    lost_names = [name for name in sorted(state) if "layers.0" not in name and name != "lm_head.weight"]
    for i, lost in enumerate(lost_names):
        source = titan("tied", tmp_path / str(i), {n: t for n, t in state.items() if n != lost})
        errors = [f for f in fastshard.plan(source, to="hf").findings if f.severity == "error"]
        assert lost in {f.tensor for f in errors} or lost == "tok_embeddings.weight", (lost, errors)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.1.attention.q_norm.weight", (16,)),
        ("layers.1.moe.shared_experts.w1.weight", (48, 32)),
        ("layers.1.feed_forward.w1.weight", (48, 32)),
        ("layers.1.moe.routed_experts.inner_experts.w1_EFD", (4, 48, 32)),
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    source = titan("yarn", tmp_path / "in", titan_gpt_oss(files("yarn")[0]) | {name: torch.zeros(shape)})
    assert_refused(source, tmp_path / "out", "FS207", command=("convert", "--to", "hf"), tensor=name)


def test_a_bias_that_hugging_face_does_not_add_is_not_dropped(tmp_path: Path) -> None:
    biases = {f"layers.{n}.moe.expert_bias_E": torch.randn(4) for n in range(4)}
    source = titan("yarn", tmp_path / "in", titan_gpt_oss(files("yarn")[0]) | biases)
    ran = assert_refused(source, tmp_path / "out", "FS207", command=("convert", "--to", "hf"))
    assert {f["tensor"] for f in ran.errors} == biases.keys() and "--exclude" in ran.errors[0]["help"]
    options = ("--exclude", "layers.*.moe.expert_bias_E")
    assert cli("convert", source, tmp_path / "left", "--to", "hf", *options).code == 0
    equal(read_result(tmp_path / "left"), files("yarn")[0])
    ran = cli("convert", source, tmp_path / "again", "--to", "dcp:torchtitan", "--dtype", "bf16")
    assert ran.code == 0, ran.out
    have = loaded(tmp_path / "again")
    assert all(torch.equal(have[name], bias) for name, bias in biases.items())


YARN = gpt_oss_maker.YARN


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": YARN | {"attention_factor": 1.5}}, "rope_scaling (attention_factor)"),
        ({"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "rope_scaling (mscale)"),
        ({"rope_parameters": YARN | {"factor": None}}, "rope_scaling (factor)"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"swiglu_limit": 9.0}, "swiglu_limit"),
        ({"layer_types": ["full_attention"] * 4}, "set of layers with a sliding window"),
        ({"layer_types": ["sliding_attention"] * 4}, "set of layers with a sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "set of layers with a sliding window"),
        ({"sliding_window": None}, "set of layers with a sliding window"),
    ],
)
def test_a_computation_that_torchtitan_does_not_have_is_refused(
    changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    """No tensor shows any of these."""
    source = hf("yarn", tmp_path / "in", **changes)
    command = ("convert", "--to", "dcp:torchtitan")
    ran = assert_refused(source, tmp_path / "out", "FS514", exit=2, command=command)
    (finding,) = ran.errors
    assert finding["message"].startswith(f"torchtitan has no gpt-oss model with this {word}"), finding
    # As it is, it is a good model.
    assert cli("convert", source, tmp_path / "same", "--to", "hf").code == 0


def test_projections_without_biases_are_refused(tmp_path: Path) -> None:
    gpt_oss_maker.model(attention_bias=False).save_pretrained(tmp_path / "in")
    command = ("convert", "--to", "dcp:torchtitan")
    ran = assert_refused(tmp_path / "in", tmp_path / "out", "FS514", exit=2, command=command)
    (finding,) = ran.errors
    assert "model with this set of biases" in finding["message"] and finding["expected"] == "on all"


def test_another_window_is_left_to_the_code_of_the_run(tmp_path: Path) -> None:
    """torchtitan's own models see 128 tokens, and no tensor shows it."""
    (finding,) = fastshard.plan(hf("yarn", tmp_path / "in"), "dcp:torchtitan").findings
    assert finding.severity == "warning" and "sliding_window_size=5" in str(finding.expected)
    source = hf("yarn", tmp_path / "usual", sliding_window=128)
    assert fastshard.plan(source, "dcp:torchtitan").findings == []


def test_a_config_means_the_same_in_both_tables() -> None:
    own, theirs = (
        tables.table(f"{of}.gpt_oss").describe(files("yarn")[1], []) for of in ("torchtitan", "hf")
    )
    assert own[0] == theirs[0] and own[2] == theirs[2]


def test_a_config_without_a_rotary_embedding_means_that_of_the_class(tmp_path: Path) -> None:
    """Null, a key of transformers 4, and nothing at all."""
    source = hf("its own rope", tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    own = config.pop("rope_parameters")
    for more in ({}, {"rope_parameters": None}, {"rope_scaling": None}, {"rope_scaling": own}):
        (source / "config.json").write_text(json.dumps(config | more))
        assert torch.equal(logits(source), files("its own rope")[2])
        model = fastshard.models.model.read_model(fastshard.open(source).opened.source)
        assert model.rope.kind == "yarn" and model.rope.base == 150000
        assert {key: model.rope.scaling[key] for key in ("factor", "truncate")} == {
            "factor": 32.0,
            "truncate": False,
        }
    (source / "config.json").write_text(json.dumps(config | {"rope_scaling": {"rope_type": "default"}}))
    model = fastshard.models.model.read_model(fastshard.open(source).opened.source)
    assert model.rope.kind == "default"


class _Real:
    """Tiny models of torchtitan itself, since August 2026. source: torchtitan models/gpt_oss/__init__.py"""

    def __init__(self) -> None:
        reason = "pip install torchtitan"
        self.oss = pytest.importorskip("torchtitan.models.gpt_oss", reason=reason, exc_type=ImportError)
        self.common = pytest.importorskip("torchtitan.models.common", reason=reason, exc_type=ImportError)

        if "max_context_length" not in self.common.CosSinRoPE.Config.__dataclass_fields__:
            pytest.skip("torchtitan is older than August 2026")

    def config(self, c: Any) -> Any:
        rope = c.rope_parameters
        scaled = {}
        if rope["rope_type"] == "yarn":
            scaled = {key: rope[key] for key in ("beta_fast", "beta_slow", "truncate")} | {
                "scaling": "yarn",
                "rope_factor": rope["factor"],
                "original_seq_len": rope["original_max_position_embeddings"],
            }
        rope = self.common.CosSinRoPE.Config(
            dim=c.head_dim, max_context_length=64, theta=rope["rope_theta"], **scaled
        )
        layers = self.oss._build_gptoss_layers(
            dim=c.hidden_size,
            n_layers=c.num_hidden_layers,
            hidden_dim=c.intermediate_size,
            num_experts=c.num_local_experts,
            top_k=c.num_experts_per_tok,
            # With a bias in the choice of experts it is another model than that of Hugging Face.
            load_balance_coeff=None,
            attn_backend="flex",
            moe_comm_backend="standard",
            rope=rope,
        )
        for n, layer in enumerate(layers):
            layer.attention = self.oss._make_gptoss_attn_config(
                dim=c.hidden_size,
                layer_id=n,
                attn_backend="flex",
                n_heads=c.num_attention_heads,
                n_kv_heads=c.num_key_value_heads,
                head_dim=c.head_dim,
                sliding_window_size=c.sliding_window if layer.attention.sliding_window_size else None,
                rope=rope,
            )
            layer.attention_norm.eps = layer.ffn_norm.eps = c.rms_norm_eps
        return self.oss.GptOssModel.Config(
            vocab_size=c.vocab_size,
            dim=c.hidden_size,
            layers=layers,
            tok_embeddings=self.common.Embedding.Config(
                num_embeddings=c.vocab_size, embedding_dim=c.hidden_size
            ),
            norm=self.common.RMSNorm.Config(normalized_shape=c.hidden_size, eps=c.rms_norm_eps),
            lm_head=self.common.Linear.Config(in_features=c.hidden_size, out_features=c.vocab_size),
        )


def _each_by_itself(_: Any, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The product of each expert, in float32: torchtitan's own kernel is for bfloat16."""
    ends = offs.tolist()
    return torch.cat([A[b:e] @ w for b, e, w in zip([0, *ends], ends, B_t, strict=False)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tied"])
def test_torchtitan_computes_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own model loads what is written and computes the same logits; its own adapter agrees."""
    real = _Real()
    from torch.nn.attention.flex_attention import flex_attention
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.moe import GroupedExperts

    config = gpt_oss_maker.model(**KINDS[kind]).config
    fastshard.convert(hf(kind, tmp_path / "hf"), tmp_path / "titan", to="dcp:torchtitan")
    network = real.config(config).build().eval()
    state = network.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    network.load_state_dict(state)
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))
    monkeypatch.setattr(GroupedExperts, "_grouped_mm", _each_by_itself)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
    with torch.no_grad():
        for tokens, want in zip(moe_maker.TOKENS, files(kind)[2], strict=True):
            positions = torch.arange(len(tokens))
            have = network(tokens, positions, network.get_attention_masks(positions))
            assert (have - want).abs().max() < 1e-4
    equal(loaded(tmp_path / "titan"), state)
    adapter = real.oss.GptOssStateDictAdapter(real.config(config), None)
    # It maps names of experts alone, those that its model had before they named their axes.
    back = adapter.to_hf(
        {
            name.replace("_EGD", "").replace("_EG", "").replace("_EDF", "").replace("_ED", ""): tensor
            for name, tensor in state.items()
        }
    )
    stored = {
        name.removesuffix("_blocks"): tensor.transpose(1, 2) if name.endswith("_blocks") else tensor
        for name, tensor in back.items()
    }
    equal(stored, files(kind)[0])
