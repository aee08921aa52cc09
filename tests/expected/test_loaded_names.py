"""Names that from_pretrained does not find: what is published loads with none missing, or is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from fastshard.expected import transformers_process
from helpers import Ran, ask_transformers_here, cli
from safetensors.torch import load_file, save_file

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES | {"intermediate_size": 64}),
    "gpt2": ("GPT2", GPT2),
    "falcon": ("Falcon", SIZES),
    "starcoder2": ("Starcoder2", SIZES | {"intermediate_size": 64, "num_key_value_heads": 2}),
    "bert": ("Bert", SIZES | {"intermediate_size": 64}),
}
HEADS = {"gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}


@pytest.fixture(autouse=True)
def ask_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask_transformers_here(monkeypatch, tmp_path / "cache")


def model(name: str, *, base: bool = False) -> Any:
    """A model with random weights."""
    stem, config = MODELS[name]
    torch.manual_seed(3)
    kind = f"{stem}Model" if base else HEADS.get(name, f"{stem}ForCausalLM")
    return getattr(transformers, kind)(getattr(transformers, f"{stem}Config")(**config))


def saved(
    folder: Path, name: str, rename: Callable[[str], str] = str, *, base: bool = False, **config: Any
) -> Path:
    """A model as save_pretrained writes it, with other names and keys of its config."""
    model(name, base=base).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({rename(n): t for n, t in load_file(file).items()}, file, {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | config))
    return folder


def missing_at_load(folder: Path) -> set[str]:
    """What from_pretrained of the class that the config names initialises itself."""
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    _, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    return set(report["missing_keys"]) | set(report["mismatched_keys"])


def run_all(source: Path, folder: Path) -> dict[str, Ran]:
    """Verifies, merges and converts; whatever is published with a config loads with none missing."""
    ran = {"verify": cli("verify", source), "merge": cli("merge", source, folder / "merged")}
    ran["convert"] = cli("convert", source, folder / "converted", "--to", "hf")
    for out in ("merged", "converted"):
        if (folder / out / "config.json").exists():
            assert missing_at_load(folder / out) == set(), out
    return ran


def errors(ran: Ran) -> list[str]:
    return [finding["code"] for finding in ran.errors]


GOOD: dict[str, tuple[str, Callable[[str], str], bool]] = {
    "llama as saved": ("llama", str, False),
    "llama without a head": ("llama", str, True),
    "gpt2 as it was published": ("gpt2", lambda n: n.removeprefix("transformer."), False),
    "bert of earlier versions": (
        "bert",
        lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ),
        False,
    ),
    "bert without a head": ("bert", str, True),
    "starcoder2": ("starcoder2", str, False),
}


@pytest.mark.parametrize("case", GOOD)
def test_names_that_are_loaded_are_good(case: str, tmp_path: Path) -> None:
    name, rename, base = GOOD[case]
    source = saved(tmp_path / "in", name, rename, base=base)
    assert missing_at_load(source) == set()
    for verb, ran in run_all(source, tmp_path).items():
        assert ran.code == 0 and not ran.having("FS119"), (verb, ran.out)
    assert (tmp_path / "merged/config.json").exists()


@pytest.mark.parametrize("prefix", ["net.", "policy.", "encoder.encoder."])
@pytest.mark.parametrize("name", ["gpt2", "falcon"])
def test_a_prefix_before_every_name_is_refused_where_no_table_knows_the_model(
    name: str, prefix: str, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in", name, lambda n: prefix + n)
    assert missing_at_load(source)
    for verb, ran in run_all(source, tmp_path).items():
        assert errors(ran) == ["FS119"], (verb, ran.out)
        assert ran.errors[0]["tensor"].startswith(prefix)
    assert not (tmp_path / "merged").exists() and not (tmp_path / "converted").exists()


@pytest.mark.parametrize("transformers_asked", [True, False])
@pytest.mark.parametrize("prefix", ["foo.", "policy.", "pretrained_model.", "module.", "_orig_mod."])
def test_a_prefix_comes_off_where_a_table_knows_the_model(
    prefix: str, transformers_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not transformers_asked:
        monkeypatch.setenv("FASTSHARD_TRANSFORMERS", "off")
    source = saved(tmp_path / "in", "llama", lambda n: prefix + n)
    ran = run_all(source, tmp_path)
    assert errors(ran["verify"]) == ["FS119"] and ran["verify"].errors[0]["tensor"].startswith(prefix)
    for verb, out in (("merge", "merged"), ("convert", "converted")):
        assert ran[verb].code == 0, ran[verb].out
        assert load_file(tmp_path / out / "model.safetensors").keys() == set(model("llama").state_dict())
        assert (tmp_path / out / "config.json").exists()


def _torchtitan(name: str) -> str:
    """source: torchtitan models/llama3/model/state_dict_adapter.py"""
    for one, other in (
        ("model.embed_tokens", "tok_embeddings"),
        ("lm_head", "output"),
        ("model.", ""),
        ("self_attn.q_proj", "attention.wq"),
        ("self_attn.k_proj", "attention.wk"),
        ("self_attn.v_proj", "attention.wv"),
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        name = name.replace(one, other)
    return name


UNLOADED: dict[str, Callable[[str], str]] = {
    "another word in the place of the base": lambda n: n.replace("model.", "foo."),
    "names of PEFT": lambda n: "base_model.model." + n.replace("q_proj.weight", "q_proj.base_layer.weight"),
    "names of torchtitan": _torchtitan,
}


@pytest.mark.parametrize("case", UNLOADED)
def test_no_config_is_written_beside_names_that_it_is_not_for(case: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "in", "llama", UNLOADED[case])
    ran = run_all(source, tmp_path)
    assert errors(ran["verify"]) == ["FS119"], ran["verify"].out
    assert ran["merge"].code == 0 and not (tmp_path / "merged/config.json").exists()
    assert any("config.json is not written" in f["message"] for f in ran["merge"].having("FS212")), ran[
        "merge"
    ].out


def test_the_names_of_another_family_are_refused(tmp_path: Path) -> None:
    """starcoder2 under falcon's config: the shapes are no reason to believe it."""
    source = saved(tmp_path / "in", "starcoder2")
    model("falcon").config.save_pretrained(tmp_path / "falcon")
    config = json.loads((tmp_path / "falcon/config.json").read_text()) | {
        "architectures": ["FalconForCausalLM"]
    }
    (source / "config.json").write_text(json.dumps(config))
    for verb, ran in run_all(source, tmp_path).items():
        assert errors(ran) == ["FS119"] and "finds 0 of its" in ran.errors[0]["message"], (verb, ran.out)


def test_a_model_without_the_head_of_its_class(tmp_path: Path) -> None:
    """It is told when it is looked at, and not published as a model with that head."""
    source = saved(tmp_path / "in", "bert", base=True, architectures=["BertForMaskedLM"])
    ran = run_all(source, tmp_path)
    assert ran["verify"].code == 0 and ran["verify"].having("FS119", severity="warning"), ran["verify"].out
    for verb in ("merge", "convert"):
        assert errors(ran[verb]) == ["FS119"], ran[verb].out


def test_one_name_that_differs_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", "starcoder2", lambda n: n.replace("embed_tokens", "embed_token"))
    for verb, ran in run_all(source, tmp_path).items():
        assert errors(ran) == ["FS119"], (verb, ran.out)
        assert (ran.errors[0]["tensor"], ran.errors[0]["expected"]) == (
            "model.embed_token.weight",
            "model.embed_tokens.weight",
        )


def test_code_of_its_own_may_have_any_names(tmp_path: Path) -> None:
    source = saved(
        tmp_path / "in", "falcon", lambda n: f"net.{n}", auto_map={"AutoModelForCausalLM": "modeling_net.Net"}
    )
    (source / "modeling_net.py").write_text("")
    assert cli("verify", source).code == 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "starcoder2"])
@pytest.mark.parametrize("container", [None, "model", "policy"])
def test_a_container_of_dcp_comes_off(name: str, container: str | None, tmp_path: Path) -> None:
    one = model(name)
    state = {
        n: t for n, t in one.state_dict().items() if n != "lm_head.weight" or name not in ("gpt2", "falcon")
    }
    dcp.save(state if container is None else {container: state}, checkpoint_id=tmp_path / "in", no_dist=True)
    one.config.architectures = [type(one).__name__]
    one.config.save_pretrained(tmp_path / "in")
    ran = run_all(tmp_path / "in", tmp_path)
    assert ran["merge"].code == 0 and (tmp_path / "merged/config.json").exists(), ran["merge"].out
    assert ran["verify"].code == 0, ran["verify"].out


def test_a_copy_is_not_judged_by_a_loader_that_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path / "in", "falcon", lambda n: f"net.{n}")
    ask = transformers_process.answer_of
    monkeypatch.setattr(
        transformers_process,
        "answer_of",
        lambda question, *limits: (
            {"error": "no memory", "kind": "limit"} if "stored" in question else ask(question, *limits)
        ),
    )
    ran = cli("verify", source)
    assert ran.code == 0 and ran.having("FS119", severity="warning"), ran.out
    shutil.rmtree(source)
