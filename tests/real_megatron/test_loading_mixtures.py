"""megatron-core loads mixtures of experts that are written, strictly, and computes what transformers does.

Needs `pip install '.[megatron]'`; see CONTRIBUTING.md. Four gloo ranks: tp 2 x pp 2, and over the same ranks
ep 2 with undivided experts.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import deepseek_maker
import delta_maker
import gpt_oss_maker
import moe_maker
import pytest
import torch
from helpers import cli
from megatron_ranks import launch

WORLD = 4
DEGREES = ("--tp", 2, "--pp", 2, "--ep", 2, "--etp", 1)
#: Rank files of the local modules divide the rows of latents, which is not written.
LATENT = {"deepseek", "yarn", "yarn_alone", "plain_queries", "further_layers", "indexer", "indexer_yarn"}
#: Built with Transformer Engine's modules alone.
OF_TRANSFORMER_ENGINE = {
    "delta_nets",
    "delta_nets_of_qwen3_5",
    "dense_delta_nets",
    "delta_nets_one_group",
}
#: Without experts, and so without ranks of theirs.
DENSE = {"dense_delta_nets"}
MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": moe_maker.model,
    "qwen3_moe": lambda: moe_maker.qwen(3),
    "unnormalised": lambda: moe_maker.qwen(3, norm_topk_prob=False),
    "dense_among": lambda: moe_maker.qwen(3, mlp_only_layers=[1], num_hidden_layers=4),
    "deepseek": deepseek_maker.model,
    "yarn": lambda: deepseek_maker.model(rope_parameters=deepseek_maker.YARN),
    "yarn_alone": lambda: deepseek_maker.model(
        rope_parameters={
            key: value for key, value in deepseek_maker.YARN.items() if not key.startswith("mscale")
        }
    ),
    "plain_queries": lambda: deepseek_maker.model(q_lora_rank=None, n_group=1, topk_group=1),
    "further_layers": lambda: deepseek_maker.model(num_nextn_predict_layers=1),
    "glm": moe_maker.glm,
    "glm_groups": lambda: moe_maker.glm(n_group=4, topk_group=2, use_qk_norm=False, attention_bias=False),
    "shared_gate": lambda: moe_maker.qwen(2, shared_expert_intermediate_size=20),
    "indexer": lambda: deepseek_maker.model(kind="deepseek_v32"),
    "indexer_yarn": lambda: deepseek_maker.model(kind="deepseek_v32", rope_parameters=deepseek_maker.YARN),
    "delta_nets": delta_maker.model,
    "delta_nets_of_qwen3_5": lambda: delta_maker.model(kind="qwen3_5_moe_text"),
    "dense_delta_nets": lambda: delta_maker.model(kind="qwen3_5_text"),
    # Fewer groups of heads than tensor-parallel ranks.
    "one_group": lambda: moe_maker.qwen(3, num_key_value_heads=1),
    "delta_nets_one_group": lambda: delta_maker.model(num_key_value_heads=1),
    "gpt_oss": gpt_oss_maker.model,
    "gpt_oss_unscaled": lambda: gpt_oss_maker.model(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, sliding_window=9
    ),
    "gpt_oss_windows": lambda: gpt_oss_maker.model(
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=gpt_oss_maker.YARN | {"truncate": True},
    ),
    "yarn_of_heads": lambda: moe_maker.qwen(3, rope_parameters=gpt_oss_maker.YARN),
    "tied": lambda: moe_maker.qwen(3, tie_word_embeddings=True, num_experts=2, num_experts_per_tok=1),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by model."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install '.[megatron]' (CONTRIBUTING.md)")
    root, source = tmp_path_factory.mktemp("real_megatron"), tmp_path_factory.mktemp("source")
    for name, make in MODELS.items():
        model = make()
        model.save_pretrained(source / name)
        if name == "further_layers":
            # transformers has none, and computes the same without them.
            deepseek_maker.save_with_further_layers(source / name, 1)
        (root / name).mkdir()
        torch.save(moe_maker.TOKENS, root / name / "tokens.pt")
        torch.save(moe_maker.logits(model), root / name / "logits.pt")
        for form in ("torch_dist",) if name in LATENT else ("legacy", "torch_dist"):
            # torch_dist serves all degrees: it is written at others than those it is loaded at.
            at: tuple[object, ...] = DEGREES if form == "legacy" else ("--ep", 2)
            if name in DENSE:
                at = ("--tp", 2, "--pp", 2) if form == "legacy" else ()
            out = root / name / form
            to = f"megatron:{form}" + ("" if name in OF_TRANSFORMER_ENGINE else "-local")
            ran = cli("convert", source / name, out, "--to", to, *at)
            assert ran.code == 0, ran.out
    ranks = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29723",
        }
        for rank in range(WORLD)
    ]
    launch("load_mixtures.py", [root], [source / f"rank_{rank}.log" for rank in range(WORLD)], ranks)
    return [json.loads((root / f"report_{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", sorted(MODELS.keys() - LATENT))
def test_both_forms_load_alike(name: str, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report[name]["tensors"] >= 10
        assert report[name]["torch_dist_is_legacy"]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, reports: list[dict[str, Any]]) -> None:
    differences = [report[name]["difference"] for report in reports if "difference" in report[name]]
    assert len(differences) == 2 and max(differences) < 1e-4, differences
