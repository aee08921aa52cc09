"""torchtitan's names of Qwen3-MoE and DeepSeek-V3, both ways.

The tensors are laid out by hand (``names_maker.titan_moe``). Where torchtitan is installed, its own models
compute what is written, and its own adapter gives the same tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import deepseek_maker
import fastshard
import moe_maker
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from fastshard.layouts import tables
from helpers import assert_refused, cli, read_result
from names_maker import titan_moe
from safetensors.torch import load_file, save_file
from test_spellings import equal, loaded


def qwen(**changes: Any) -> Any:
    # torchtitan's Qwen3 always norms the weights of the chosen experts.
    return moe_maker.qwen(3, norm_topk_prob=True, **changes)


#: The model, and whether its rotary pairs are halves that torchtitan wants side by side.
MODELS: dict[str, tuple[Callable[[], Any], bool]] = {
    "qwen": (qwen, False),
    "qwen_tied": (lambda: qwen(tie_word_embeddings=True), False),
    "qwen_dense": (lambda: qwen(num_hidden_layers=4, mlp_only_layers=[0, 3]), False),
    "qwen_step": (lambda: qwen(num_hidden_layers=4, decoder_sparse_step=2), False),
    "deepseek": (deepseek_maker.model, False),
    "deepseek_straight": (lambda: deepseek_maker.model(q_lora_rank=None), False),
    "deepseek_halves": (lambda: deepseek_maker.model(rope_interleave=False), True),
    "deepseek_straight_halves": (lambda: deepseek_maker.model(q_lora_rank=None, rope_interleave=False), True),
}


#: Rotary embeddings scaled by YaRN.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@cache
def model(kind: str) -> Any:
    return MODELS[kind][0]()


@cache
def files(kind: str) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors that transformers saves, and the text of config.json."""
    with TemporaryDirectory() as folder:
        model(kind).save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors"), (Path(folder) / "config.json").read_text()


def hf(kind: str, folder: Path, more: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir()
    tensors, config = files(kind)
    (folder / "config.json").write_text(json.dumps(json.loads(config) | changes))
    save_file(tensors | (more or {}), folder / "model.safetensors", {"format": "pt"})
    return folder


def by_hand(kind: str, age: int = 0) -> dict[str, torch.Tensor]:
    tensors, config = files(kind)
    return titan_moe(tensors, json.loads(config), age=age, halves=MODELS[kind][1])


def titan(kind: str, folder: Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    """torchtitan's checkpoint, with the model's config.json beside it."""
    dcp.save(by_hand(kind) if state is None else state, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(files(kind)[1])
    return folder


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_written_is_as_torchtitan_lays_it_out(kind: str, tp: int, tmp_path: Path) -> None:
    ran = cli("convert", hf(kind, tmp_path / "hf"), tmp_path / "out", "--to", "dcp:torchtitan", "--tp", tp)
    assert (ran.code, ran.findings) == (0, []), ran.out
    want = by_hand(kind)
    if kind == "qwen_tied":
        # A state dict has a tied head under its own name too.
        want["lm_head.weight"] = want["tok_embeddings.weight"]
    equal(loaded(tmp_path / "out"), want)
    assert cli("convert", tmp_path / "out", tmp_path / "back", "--to", "hf").code == 0
    have = read_result(tmp_path / "back")
    equal({name: have[name] for name in have if name in files(kind)[0]}, files(kind)[0])


def test_halves_are_turned_and_nothing_else() -> None:
    """The layout by hand tells the two orders apart."""
    straight, turned = by_hand("deepseek"), by_hand("deepseek_halves")
    differ = {name.split(".", 2)[2] for name in straight if not torch.equal(straight[name], turned[name])}
    assert differ == {"attention.wq_b.weight", "attention.wkv_a.weight"}
    assert torch.equal(files("deepseek")[0]["lm_head.weight"], files("deepseek_halves")[0]["lm_head.weight"])


@pytest.mark.parametrize("age", [0, 1, 2])
@pytest.mark.parametrize("kind", ["qwen", "qwen_dense", "deepseek", "deepseek_straight_halves"])
def test_names_of_every_age_are_read(kind: str, age: int, tmp_path: Path) -> None:
    extra = {
        "optimizer": {"state": {"norm.weight": {"exp_avg": torch.ones(3)}}},
        "train_state": {"step": torch.tensor(4)},
    }
    source = titan(kind, tmp_path / "step-10", by_hand(kind, age) | extra)  # type: ignore[arg-type]
    assert cli("convert", source, tmp_path / "back", "--to", "hf").code == 0
    equal(read_result(tmp_path / "back"), files(kind)[0])
    # A merge keeps the names that it finds.
    assert cli("merge", titan(kind, tmp_path / "bare", by_hand(kind, age)), tmp_path / "merged").code == 0
    equal(read_result(tmp_path / "merged"), by_hand(kind, age))
    tokens = torch.arange(24).reshape(2, 12) * 31 % model(kind).config.vocab_size
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(kind)(tokens).logits)


def test_by_way_of_megatron(tmp_path: Path) -> None:
    """Sources that have no config of Hugging Face have the facts of their table too."""
    at = hf("qwen", tmp_path / "hf")
    steps: tuple[tuple[str, ...], ...] = (
        ("megatron:torch_dist", "--tp", "2", "--ep", "2"),
        ("dcp:torchtitan", "--vocab-size", "250"),
        ("hf",),
    )
    for n, (to, *options) in enumerate(steps):
        ran = cli("convert", at, tmp_path / str(n), "--to", to, *options)
        assert ran.code == 0, (to, ran.out)
        at = tmp_path / str(n)
    equal(loaded(tmp_path / "1"), by_hand("qwen"))
    equal(read_result(at), files("qwen")[0])


@pytest.mark.parametrize("kind", ["qwen_dense", "deepseek", "deepseek_straight"])
def test_every_lost_tensor_is_named(kind: str, tmp_path: Path) -> None:
    state = by_hand(kind)
    for i, lost in enumerate(sorted(state)):
        source = titan(kind, tmp_path / str(i), {n: t for n, t in state.items() if n != lost})
        errors = [
            f for f in fastshard.plan(fastshard.open(source), to="hf").findings if f.severity == "error"
        ]
        assert [(f.code, f.tensor) for f in errors] == [("FS102", lost)]


def test_every_lost_file_is_missed(tmp_path: Path) -> None:
    source = hf("deepseek", tmp_path / "hf")
    assert cli("convert", source, tmp_path / "whole", "--to", "dcp:torchtitan", "--tp", "2").code == 0
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", "config.json", "fastshard.manifest.json"} <= set(
        names
    )
    for name in names:
        part = shutil.copytree(tmp_path / "whole", tmp_path / "parts" / name)
        (part / name).unlink()
        ran = cli("convert", part, tmp_path / f"out-{name}", "--to", "hf")
        if name == "fastshard.manifest.json":
            assert ran.code == 0
            equal(read_result(tmp_path / f"out-{name}"), files("deepseek")[0])
        else:
            assert ran.code in (1, 2, 3) and ran.errors and not (tmp_path / f"out-{name}").exists(), name


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("qwen", "layers.1.moe.router.gate.bias", (4,)),
        ("qwen", "layers.1.moe.shared_experts.w1.weight", (24, 32)),
        ("qwen_dense", "layers.0.moe.router.gate.weight", (4, 32)),
        ("qwen_dense", "layers.1.feed_forward.w1.weight", (40, 32)),
        ("deepseek", "layers.0.moe.router.gate.weight", (4, 16)),
        ("deepseek", "layers.2.attention.wq.weight", (40, 16)),
        ("deepseek", "mtp_layers.0.enorm.weight", (16,)),
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused(
    kind: str, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    source = titan(kind, tmp_path / "in", by_hand(kind) | {name: torch.zeros(shape)})
    assert_refused(source, tmp_path / "out", "FS207", command=("convert", "--to", "hf"), tensor=name)


@pytest.mark.parametrize("kind", ["qwen", "qwen_dense"])
def test_a_bias_that_hugging_face_does_not_add_is_not_dropped(kind: str, tmp_path: Path) -> None:
    """Without it other experts are chosen. torchtitan's models keep it."""
    biases = {
        name.replace("router.gate.weight", "expert_bias_E"): torch.randn(4)
        for name in by_hand(kind)
        if name.endswith("router.gate.weight")
    }
    assert len(biases) == 2
    source = titan(kind, tmp_path / "in", by_hand(kind) | biases)
    ran = assert_refused(source, tmp_path / "out", "FS207", command=("convert", "--to", "hf"))
    assert {f["tensor"] for f in ran.errors} == biases.keys() and "--exclude" in ran.errors[0]["help"]
    # Left out on purpose.
    options = ("--exclude", "layers.*.moe.expert_bias_E")
    assert cli("convert", source, tmp_path / "left", "--to", "hf", *options).code == 0
    equal(read_result(tmp_path / "left"), files(kind)[0])
    for dtype, bias in (("keep", torch.float32), ("bf16", torch.float32)):
        ran = cli("convert", source, tmp_path / dtype, "--to", "dcp:torchtitan", "--dtype", dtype)
        assert ran.code == 0, ran.out
        have = loaded(tmp_path / dtype)
        assert have.keys() == by_hand(kind).keys() | biases.keys()
        assert all(have[n].dtype == bias and torch.equal(have[n], biases[n]) for n in biases)
    # In one layer of several it is no whole.
    one = dict(list(biases.items())[:1])
    part = titan(kind, tmp_path / "part", by_hand(kind) | one)
    assert [(f["code"], f["tensor"]) for f in cli("verify", part).errors] == [("FS102", list(biases)[1])]


def test_layers_that_predict_further_tokens_are_refused_by_name(tmp_path: Path) -> None:
    """The files of Hugging Face repeat the embedding and the head in each; torchtitan's have one of both."""
    have = files("deepseek")[0]
    layer = {n.replace("layers.3.", "layers.4."): t + 2 for n, t in have.items() if ".layers.3." in n}
    sizes = {"enorm": (32,), "hnorm": (32,), "eh_proj": (32, 64), "embed_tokens": (250, 32)}
    sizes |= {"shared_head.norm": (32,), "shared_head.head": (250, 32)}
    own = {f"model.layers.4.{n}.weight": torch.ones(size) for n, size in sizes.items()}
    source = hf("deepseek", tmp_path / "in", layer | own, num_nextn_predict_layers=1)
    assert fastshard.plan(fastshard.open(source)).findings == []
    ran = assert_refused(
        source, tmp_path / "out", "FS514", exit=2, command=("convert", "--to", "dcp:torchtitan")
    )
    (finding,) = ran.errors
    assert "torchtitan has no DeepSeek-V3 model with this number of MTP layers" in finding["message"]


def test_a_bias_of_attention_that_torchtitan_does_not_have_is_refused(tmp_path: Path) -> None:
    for kind, network in (
        ("qwen", qwen(attention_bias=True)),
        ("deepseek", deepseek_maker.model(attention_bias=True)),
    ):
        network.save_pretrained(tmp_path / kind)
        command = ("convert", "--to", "dcp:torchtitan")
        ran = assert_refused(tmp_path / kind, tmp_path / "out", "FS514", exit=2, command=command)
        (finding,) = ran.errors
        assert "model with this set of biases" in finding["message"] and finding["expected"] == "on none"


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("qwen", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding window"),
        ("qwen", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope"),
        ("deepseek", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope"),
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek", YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, "rope_scaling (mscale)"),
        ("deepseek", YARN | {"attention_factor": 1.5}, "rope_scaling (attention_factor)"),
        ("deepseek", YARN, "rope_scaling (mscale_all_dim)"),
    ],
)
def test_a_computation_that_torchtitan_does_not_have_is_refused(
    kind: str, changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    """No tensor shows any of these."""
    if "factor" in changes:
        changes = {"rope_parameters": changes}
    source = hf(kind, tmp_path / "in", **changes)
    ran = assert_refused(
        source, tmp_path / "out", "FS514", exit=2, command=("convert", "--to", "dcp:torchtitan")
    )
    (finding,) = ran.errors
    assert f"model with this {word}" in finding["message"], finding


def test_weights_that_are_not_normed_are_left_to_the_code_of_the_run(tmp_path: Path) -> None:
    """torchtitan's own Qwen3-MoE norms the weights of the chosen experts, and no tensor shows it."""
    source = hf("qwen", tmp_path / "in", norm_topk_prob=False)
    (finding,) = fastshard.plan(source, "dcp:torchtitan").findings
    assert finding.severity == "warning" and finding.expected == "route_norm=False in the code of the run"


def test_a_mixture_that_torchtitan_does_not_have_is_refused(tmp_path: Path) -> None:
    """Qwen2-MoE, whose tensors a table of the same name would describe."""
    moe_maker.qwen(2).save_pretrained(tmp_path / "hf")
    command = ("convert", "--to", "dcp:torchtitan")
    assert_refused(tmp_path / "hf", tmp_path / "out", "FS514", exit=2, command=command)
    source = titan("qwen", tmp_path / "titan")
    shutil.copy(tmp_path / "hf/config.json", source / "config.json")
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert ran.code == 2 and "torchtitan has no model of the type 'qwen2_moe'" in json.dumps(ran.errors)


@pytest.mark.parametrize("layout", ["qwen_moe", "qwen2_moe", "deepseek_v3"])
def test_a_config_means_the_same_in_both_tables(layout: str) -> None:
    """A config means the same extents, and layers of the same kinds, in both."""
    kind = {"qwen_moe": "qwen", "qwen2_moe": "qwen_dense", "deepseek_v3": "deepseek"}[layout]
    own, theirs = (tables.table(f"{of}.{layout}").describe(files(kind)[1], []) for of in ("torchtitan", "hf"))
    assert {axis: n for axis, n in theirs[0].items() if axis in own[0]} == own[0]
    assert own[2] == theirs[2]


class _Real:
    """Tiny models of torchtitan itself. source: torchtitan 0.3.0 models/{qwen3,deepseek_v3}/__init__.py"""

    def __init__(self) -> None:
        reason = "pip install torchtitan"
        self.qwen3 = pytest.importorskip("torchtitan.models.qwen3", reason=reason, exc_type=ImportError)
        self.v3 = pytest.importorskip("torchtitan.models.deepseek_v3", reason=reason, exc_type=ImportError)
        self.common = pytest.importorskip("torchtitan.models.common", reason=reason, exc_type=ImportError)

    def config(self, c: Any) -> Any:
        theta = c.rope_parameters["rope_theta"]
        shared = {"n_layers": c.num_hidden_layers, "dim": c.hidden_size, "n_heads": c.num_attention_heads}
        shared |= {"attn_backend": "flex"}
        experts = {"moe_hidden_dim": c.moe_intermediate_size, "moe_comm_backend": "standard"}
        if c.model_type == "qwen3_moe":
            rope = self.common.CosSinRoPE.Config(dim=c.head_dim, max_seq_len=64, theta=theta)
            shared |= {"n_kv_heads": c.num_key_value_heads, "head_dim": c.head_dim, "rope": rope}
            layers = self.qwen3._build_qwen3_moe_layers(
                **shared, **experts, num_experts=c.num_experts, top_k=c.num_experts_per_tok
            )
            dense = self.qwen3._build_qwen3_layers(**shared, hidden_dim=c.intermediate_size)
            layers = [
                d if n in c.mlp_only_layers else m for n, (m, d) in enumerate(zip(layers, dense, strict=True))
            ]
            for layer in layers:
                if layer.moe is not None:
                    # With a bias in the choice of experts it is another model than that of Hugging Face.
                    layer.moe.load_balance_coeff = None
            config_class = self.qwen3.Qwen3Model.Config
        else:
            names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            rope = self.common.ComplexRoPE.Config(dim=c.qk_rope_head_dim, max_seq_len=64, theta=theta)
            layers = self.v3._build_dsv3_layers(
                **shared,
                **experts,
                **{name: getattr(c, name) for name in names},
                n_dense_layers=c.first_k_dense_replace,
                q_lora_rank=c.q_lora_rank or 0,
                mscale=1.0,
                dense_hidden_dim=c.intermediate_size,
                num_experts=c.n_routed_experts,
                num_shared_experts=c.n_shared_experts,
                router_top_k=c.num_experts_per_tok,
                router_score_func="sigmoid",
                router_num_expert_groups=c.n_group,
                router_num_limited_groups=c.topk_group,
                router_route_scale=c.routed_scaling_factor,
                router_route_norm=c.norm_topk_prob,
                non_blocking_capacity_factor=None,
                rope=rope,
            )
            config_class = self.v3.DeepSeekV3Model.Config
        from torchtitan.models.common.attention import ScaledDotProductAttention

        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
            named = (getattr(layer.attention, norm, None) for norm in ("q_norm", "kv_norm", "qk_norm"))
            for norm in (layer.attention_norm, layer.ffn_norm, *named):
                if norm is not None:
                    norm.eps = c.rms_norm_eps
        return config_class(
            vocab_size=c.vocab_size,
            dim=c.hidden_size,
            layers=layers,
            tok_embeddings=self.common.Embedding.Config(
                num_embeddings=c.vocab_size, embedding_dim=c.hidden_size
            ),
            norm=self.common.RMSNorm.Config(normalized_shape=c.hidden_size, eps=c.rms_norm_eps),
            lm_head=self.common.Linear.Config(in_features=c.hidden_size, out_features=c.vocab_size),
        )

    def model(self, c: Any) -> Any:
        config = self.config(c)
        of_qwen = c.model_type == "qwen3_moe"
        model = self.qwen3.Qwen3Model(config) if of_qwen else self.v3.DeepSeekV3Model(config)
        return model.eval()

    def adapter(self, c: Any) -> Any:
        of_qwen = c.model_type == "qwen3_moe"
        kind = self.qwen3.Qwen3StateDictAdapter if of_qwen else self.v3.DeepSeekV3StateDictAdapter
        return kind(self.config(c), None)


def _each_by_itself(_: Any, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The product of each expert, in float32: torchtitan's own kernel is for bfloat16."""
    ends = offs.tolist()
    return torch.cat([A[b:e] @ w for b, e, w in zip([0, *ends], ends, B_t, strict=False)])


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("qwen_tied", "qwen_step")])
def test_torchtitan_computes_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own model loads what is written and computes the same logits; its own adapter agrees."""
    real = _Real()
    of = model(kind)
    tokens = torch.arange(24).reshape(2, 12) * 31 % of.config.vocab_size
    with torch.no_grad():
        want = of(tokens).logits
    fastshard.convert(hf(kind, tmp_path / "hf"), tmp_path / "titan", to="dcp:torchtitan")
    network = real.model(of.config)
    state = network.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    network.load_state_dict(state)
    from torchtitan.models.common.moe import GroupedExperts

    monkeypatch.setattr(GroupedExperts, "_grouped_mm", _each_by_itself)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
    with torch.no_grad():
        assert (network(tokens) - want).abs().max() < 1e-4
    equal(loaded(tmp_path / "titan"), state)
    if not MODELS[kind][1]:
        # It takes the pairs of DeepSeek-V3 as they are, whatever rope_interleave says.
        equal(real.adapter(of.config).from_hf(dict(files(kind)[0])), state)
        back = real.adapter(of.config).to_hf(dict(state))
        equal(back, files(kind)[0])
