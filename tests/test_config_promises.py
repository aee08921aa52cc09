"""What config.json promises besides tensors: lists by layer, code, ties; and small files of trainers that promise nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from helpers import ask_transformers_here, cli
from safetensors.torch import load_file, save_file

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "intermediate_size": 64,
}


@pytest.fixture
def ask_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask_transformers_here(monkeypatch, tmp_path / "cache")


def saved(folder: Path, kind: str, *, remove: tuple[str, ...] = (), **config: Any) -> Path:
    """A model as save_pretrained writes it, with other keys in its config."""
    torch.manual_seed(5)
    made = getattr(transformers, f"{kind}Config")(
        **SIZES | ({"head_dim": 8} if kind.startswith("Gemma") else {})
    )
    getattr(transformers, f"{kind}ForCausalLM")(made).save_pretrained(folder)
    stated = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in stated.items() if k not in remove}))
    return folder


@pytest.mark.parametrize(
    ("kinds", "more", "code"),
    [
        (["full_attention"] * 2, {}, 0),
        (["full_attention"] * 3, {}, 1),
        (["full_attention"], {}, 1),
        (["full_attention"] * 3, {"num_nextn_predict_layers": 1}, 0),
        ("full_attention", {}, 0),
        (["full_attention"] * 3, {"auto_map": {"AutoModelForCausalLM": "other/repo--net.Net"}}, 0),
    ],
)
def test_a_list_by_layer_has_an_entry_for_each(
    kinds: Any, more: dict[str, Any], code: int, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in", "Llama", layer_types=kinds, **more)
    for command in (
        ("verify", source),
        ("merge", source, tmp_path / "out"),
        ("convert", source, tmp_path / "hf", "--to", "hf"),
    ):
        ran = cli(*command)
        # MTP layers that the config promises and no file holds are a warning of their own.
        assert ran.code == code, (command[0], ran.out)
        assert bool(ran.having("FS215", severity="error")) == bool(code)
    assert (tmp_path / "out").exists() == (code == 0)


def test_code_that_auto_map_names_lies_beside_it(tmp_path: Path) -> None:
    names = {
        "AutoConfig": "configuration_net.NetConfig",
        "AutoModelForCausalLM": "modeling_net.Net",
        "AutoTokenizer": ["tokenization_net.Net", None],
    }
    source = saved(tmp_path / "in", "Llama", auto_map=names)
    (source / "configuration_net.py").write_text("")
    for command in (("verify", source), ("merge", source, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 0
        assert [f["file"] for f in ran.having("FS101", severity="warning")] == [
            "modeling_net.py",
            "tokenization_net.py",
        ], ran.out
    for name in ("modeling_net.py", "tokenization_net.py"):
        (source / name).write_text("")
    assert not cli("verify", source).having("FS101")
    elsewhere = saved(tmp_path / "elsewhere", "Llama", auto_map={"AutoModel": "org/repo--modeling_net.Net"})
    assert not cli("verify", elsewhere).having("FS101")


def retied(folder: Path, head: torch.Tensor | None) -> Path:
    """The model with an output layer that is stored besides."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() if head is None else head
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize(
    ("kind", "config", "remove", "severity"),
    [
        ("Gemma", {}, ("tie_word_embeddings",), "warning"),
        ("Gemma", {"tie_word_embeddings": True}, (), "error"),
        ("Starcoder2", {"tie_word_embeddings": True}, (), "error"),
        ("Starcoder2", {"tie_word_embeddings": False}, (), None),
    ],
)
def test_tied_tensors_that_are_stored_twice_are_compared(
    kind: str,
    config: dict[str, Any],
    remove: tuple[str, ...],
    severity: str | None,
    differs: bool,
    ask_here: None,
    tmp_path: Path,
) -> None:
    source = retied(
        saved(tmp_path / "in", kind, remove=remove, **config), torch.ones(64, 32) if differs else None
    )
    ran = cli("verify", source)
    found = ran.having("FS311", tensor="lm_head.weight")
    assert [f["severity"] for f in found] == ([severity] if differs and severity else []), ran.out
    assert ran.code == (1 if differs and severity == "error" else 0), ran.out


@pytest.mark.parametrize("content", ['{"step": 10}', "[]", "not json", '{"sharded": true}'])
def test_a_trainers_metadata_json_makes_no_megatron_of_a_dcp(content: str, tmp_path: Path) -> None:
    dcp.save({"model": {"a.weight": torch.ones(2, 2)}}, checkpoint_id=tmp_path / "in", no_dist=True)
    (tmp_path / "in/metadata.json").write_text(content)
    ran = cli("merge", tmp_path / "in", tmp_path / "out")
    assert ran.code == 0, ran.out


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_both_spellings_of_the_dtype_are_written_alike(keys: tuple[str, ...], tmp_path: Path) -> None:
    source = saved(tmp_path / "in", "Llama", remove=("dtype", "torch_dtype"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, "float32")))
    assert cli("merge", source, tmp_path / "out", "--dtype", "bf16").code == 0
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: written[key] for key in ("dtype", "torch_dtype") if key in written} == dict.fromkeys(
        keys, "bfloat16"
    )
