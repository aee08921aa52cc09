"""Adapters that lack what their config promises are refused by name; what PEFT saves is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from helpers import cli, edit_safetensors, read_result
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
)

Tensors = dict[str, torch.Tensor]
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
SAVES: dict[str, Any] = {**PLAIN, "modules_to_save": ["embed_tokens", "lm_head"]}


def write_base(kind: str, folder: Path) -> None:
    """Saves a tiny model."""
    if kind != "mixtral":
        tiny_models.model(kind, folder)
        return
    torch.manual_seed(3)
    config = MixtralConfig(**tiny_models.SIZES, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_adapter(options: dict[str, Any], folder: Path, kind: str = "llama") -> tuple[Path, Path]:
    """Saves a base and a trained adapter of it, as PEFT saves both."""
    write_base(kind, folder / "base")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(**options))
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def drop(*words: str) -> Callable[[Tensors], None]:
    """Drops the tensors whose names have one of the words."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if any(word in name for word in words)]:
            del tensors[name]

    return change


def empty(*words: str) -> Callable[[Tensors], None]:
    """Leaves tensors of size 0, as ZeRO-3 does."""

    def change(tensors: Tensors) -> None:
        tensors.update({n: torch.zeros(0) for n in tensors if any(word in n for word in words)})

    return change


def zero_rank(tensors: Tensors) -> None:
    """Makes factors of rank 0."""
    for name, tensor in list(tensors.items()):
        if "layers.1.self_attn.q_proj" in name:
            tensors[name] = (tensor[:0] if "lora_A" in name else tensor[:, :0]).clone()


#: By what is lost: the adapter's options, the change, and a word that the error has.
LOST: dict[str, tuple[dict[str, Any], Callable[[Tensors], None], str]] = {
    "all tensors": (PLAIN, drop(""), "adapter_model.safetensors"),
    "all factors": (SAVES, drop("lora_"), "adapter_model.safetensors"),
    "a layer between others": (PLAIN, drop("layers.1."), "layers.1.self_attn.q_proj"),
    "a module of a layer": (PLAIN, drop("layers.2.self_attn.v_proj"), "layers.2.self_attn.v_proj"),
    "all B": (PLAIN, drop("lora_B"), "lora_B"),
    "an A": (PLAIN, drop("layers.3.self_attn.q_proj.lora_A"), "layers.3.self_attn.q_proj.lora_A"),
    "values of a B": (PLAIN, empty("layers.0.self_attn.q_proj.lora_B"), "layers.0.self_attn.q_proj.lora_B"),
    "values of all": (PLAIN, empty(""), "lora_A"),
    "values of what is saved": (SAVES, empty("embed_tokens"), "embed_tokens"),
    "values of a product": (PLAIN, zero_rank, "layers.1.self_attn.q_proj.lora_A"),
    "what is saved": (SAVES, drop("lm_head"), "lm_head"),
}


@pytest.mark.parametrize("lost", LOST)
def test_what_an_adapter_lacks_by_its_own_shape_is_an_error_with_and_without_its_base(
    lost: str, tmp_path: Path
) -> None:
    options, change, word = LOST[lost]
    base, adapter = write_adapter(options, tmp_path)
    edit_safetensors(adapter / "adapter_model.safetensors", change)
    merged = cli("merge", base, tmp_path / "out", "--adapter", adapter)
    verified = cli("verify", adapter)
    for ran in (merged, verified):
        errors = [finding for finding in ran.errors if finding["code"] == "FS102"]
        assert ran.code == 3 and len(errors) == len(ran.errors) == 1, ran.out
        assert word in json.dumps(errors) and errors[0]["help"] and "--include" not in ran.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lost", [("v_proj",), ("layers.1.", "layers.2.")])
def test_what_a_base_alone_tells_is_an_error_where_the_base_has_it(
    lost: tuple[str, ...], tmp_path: Path
) -> None:
    """PEFT passes over words of the list that a model does not have, and hybrids have a module in a few
    layers."""
    base, adapter = write_adapter(PLAIN, tmp_path)
    edit_safetensors(adapter / "adapter_model.safetensors", drop(*lost))
    ran = cli("merge", base, tmp_path / "out", "--adapter", adapter)
    assert ran.code == 3 and lost[0].strip(".") in ran.errors[0]["tensor"], ran.out
    ran = cli("verify", adapter)
    assert ran.code == 0 and ("no module v_proj has factors" in ran.out) == (lost == ("v_proj",))


@pytest.mark.parametrize("base_class", [LlamaForCausalLM, LlamaForSequenceClassification])
def test_a_head_that_the_base_lacks_is_a_warning(base_class: Any, tmp_path: Path) -> None:
    """PEFT trains a classifier on a base that is saved as a language model."""
    config = LlamaConfig(**tiny_models.SIZES, num_labels=3)
    base_class(config).save_pretrained(tmp_path / "base")
    trained = get_peft_model(
        LlamaForSequenceClassification(config),
        LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["q_proj"]),
    )
    trained.save_pretrained(tmp_path / "adapter")
    ran = cli("merge", tmp_path / "base", tmp_path / "out", "--adapter", tmp_path / "adapter")
    assert ran.code == 0, ran.out
    warned = [finding["tensor"] for finding in ran.having("FS119", severity="warning")]
    assert warned == ([] if base_class is LlamaForSequenceClassification else ["score.weight"])
    assert torch.equal(read_result(tmp_path / "out")["score.weight"], trained.base_model.model.score.weight)


@pytest.mark.parametrize(("factor", "dtype"), [("lora_B", torch.float32), ("lora_A", torch.bfloat16)])
def test_an_update_that_is_zero_throughout_warns(factor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base, adapter = write_adapter(PLAIN, tmp_path)
    file = adapter / "adapter_model.safetensors"
    last = f"layers.3.self_attn.v_proj.{factor}.weight"
    edit_safetensors(file, lambda t: t.update({n: (v * (factor not in n)).to(dtype) for n, v in t.items()}))
    for ran in (cli("merge", base, tmp_path / "out", "--adapter", adapter), cli("verify", adapter)):
        # Zero matrices of an adapter by itself are found one by one besides.
        warned = [f["message"] for f in ran.findings if "changes nothing" in f["message"]]
        assert ran.code == 0 and warned == [f"the adapter changes nothing: every {factor} is zero"]

    def train_one(tensors: Tensors) -> None:
        tensors[f"base_model.model.model.{last}"].view(-1)[-1] = 1

    edit_safetensors(file, train_one)
    for ran in (cli("merge", base, tmp_path / "again", "--adapter", adapter), cli("verify", adapter)):
        assert ran.code == 0 and "the adapter changes nothing" not in ran.out


@pytest.mark.parametrize("place", ["adapter", "above", "beside"])
def test_an_empty_adapter_beside_a_run_of_deepspeed_says_where_its_factors_are(
    place: str, tmp_path: Path
) -> None:
    base, adapter = write_adapter(PLAIN, tmp_path / "all")
    edit_safetensors(adapter / "adapter_model.safetensors", drop(""))
    run = {"adapter": adapter, "above": adapter.parent, "beside": adapter.parent / "checkpoint-7"}[place]
    (run / "global_step7").mkdir(parents=True)
    for ran in (cli("merge", base, tmp_path / "out", "--adapter", adapter), cli("verify", adapter)):
        assert ran.errors[0]["run"] == [
            f"fastshard convert {run} OUT --to hf --adapter {adapter / 'adapter_config.json'}"
        ]


#: Adapters as PEFT saves them: the base's kind, and options.
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "the last layers": ("llama", {**PLAIN, "layers_to_transform": [2, 3], "layers_pattern": "layers"}),
    "layers one by one": ("llama", {**PLAIN, "layers_to_transform": [0, 3]}),
    "a pattern": ("llama", {**PLAIN, "target_modules": r"^(?!.*visual).*(?:q_proj|gate_proj).*"}),
    "all-linear": ("llama", {**PLAIN, "target_modules": "all-linear", "use_rslora": True}),
    "modules left out": ("llama", {**PLAIN, "exclude_modules": r".*layers\.1\..*"}),
    "modules by full names": (
        "llama",
        {**PLAIN, "target_modules": ["layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj"]},
    ),
    "words for other models": (
        "llama",
        {**PLAIN, "target_modules": ["q_proj", "c_attn"], "modules_to_save": ["embed_tokens", "wte"]},
    ),
    "stacked experts": (
        "mixtral",
        {**PLAIN, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
    "DoRA with patterns": (
        "llama",
        {**PLAIN, "use_dora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    ),
    "biases": ("llama_biases", {**PLAIN, "lora_bias": True}),
}


#: Those whose modules only peft finds, or that it saves in its own way.
OF_PEFT = ("the last layers", "a pattern", "all-linear", "words for other models", "stacked experts")


@pytest.mark.parametrize("good", GOOD)
def test_what_peft_saves_is_accepted_by_peft_and_without_it(
    good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = GOOD[good]
    base, adapter = write_adapter(options, tmp_path, kind)
    assert cli("verify", adapter).code == 0
    # Of what shapes alone tell, peft need not be asked again.
    for asks in ("off", "auto") if good in OF_PEFT else ("off",):
        monkeypatch.setenv("FASTSHARD_TRANSFORMERS", asks)
        ran = cli("verify", base, "--adapter", adapter)
        assert ran.code == 0 and "FS102" not in ran.out, ran.out
        assert ("whether every target module has factors" in ran.out) == (asks == "off"), ran.out


def change_config(adapter: Path, **values: Any) -> None:
    """Sets keys of an adapter's config, and removes those whose value is `...`."""
    file = adapter / "adapter_config.json"
    config = {
        key: value for key, value in (json.loads(file.read_text()) | values).items() if value is not ...
    }
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("lost", ["layers.3.", "layers.0.", "v_proj"])
def test_what_peft_loads_with_missing_keys_is_an_error_by_peft(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTSHARD_TRANSFORMERS", "auto")
    # A pattern is PEFT's to match.
    base, adapter = write_adapter({**PLAIN, "target_modules": r".*\.(q|v)_proj"}, tmp_path)
    edit_safetensors(adapter / "adapter_model.safetensors", drop(lost))
    model = AutoModelForCausalLM.from_pretrained(base)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        PeftModel.from_pretrained(model, adapter)
    ran = cli("merge", base, tmp_path / "out", "--adapter", adapter)
    assert ran.code == 3 and [f["code"] for f in ran.errors] == ["FS102"], ran.out
    assert lost.strip(".") in json.dumps(ran.errors) and not (tmp_path / "out").exists()
    # A key of a later version is passed over; without a version the config may be anybody's.
    change_config(adapter, peft_version=..., a_key_of_tomorrow={"a": 1})
    ran = cli("merge", base, tmp_path / "out", "--adapter", adapter)
    assert ran.code == 0 and "FS102" in [f["code"] for f in ran.findings if f["severity"] == "warning"], (
        ran.out
    )


@pytest.mark.parametrize("options", [SAVES, {**PLAIN, "target_modules": ["q_proj", "embed_tokens"]}])
def test_an_adapters_tensors_are_no_second_copy_of_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    """The config and what else stands beside the base go along, whatever the adapter saves."""
    base, adapter = write_adapter(options, tmp_path)
    (base / "generation_config.json").write_text("{}")
    ran = cli("merge", base, tmp_path / "out", "--adapter", adapter)
    assert ran.code == 0 and "config.json is not written" not in ran.out, ran.out
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).exists()


#: What an adapter saves of embedding and head.
TIES: dict[str, dict[str, Any]] = {
    "embedding": {**PLAIN, "modules_to_save": ["embed_tokens"]},
    "head": {**PLAIN, "modules_to_save": ["lm_head"]},
    "both": SAVES,
    "tied again": {**PLAIN, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("stores_head", [False, True])
@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
@pytest.mark.parametrize("ties", TIES)
def test_embedding_and_head_are_those_of_pefts_own_merge(
    ties: str, kind: str, stores_head: bool, tmp_path: Path
) -> None:
    base, adapter = write_adapter(TIES[ties], tmp_path, kind)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    if stores_head and kind == "llama_tied":
        embedding = "model.embed_tokens.weight"
        edit_safetensors(
            base / "model.safetensors", lambda t: t.update({"lm_head.weight": t[embedding].clone()})
        )
    ran = cli("merge", base, tmp_path / "out", "--adapter", adapter)
    assert ran.code == 0, ran.out
    have, want = read_result(tmp_path / "out"), merged.state_dict()
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], want[name]) for name in want)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("container", ["", "model"])
def test_a_dcp_of_a_run_that_trains_an_adapter(container: str, tmp_path: Path) -> None:
    """Saved flat, or below a key of the trainer's, as torch saves it on one process."""
    import torch.distributed.checkpoint as dcp

    base, adapter = write_adapter(PLAIN, tmp_path)
    live = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    state = dict(live.state_dict())
    dcp.save({container: state} if container else state, checkpoint_id=tmp_path / "run", no_dist=True)
    options = ["--adapter", adapter / "adapter_config.json", "--config", base / "config.json"]
    ran = cli("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", *options)
    assert ran.code == 0, ran.out
    have, want = read_result(tmp_path / "out"), live.merge_and_unload().state_dict()
    assert have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)
