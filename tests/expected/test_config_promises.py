"""What config.json promises besides tensors: lists by layer, code, ties; and small files of trainers that
promise nothing."""

from __future__ import annotations

import json
import shutil
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


@pytest.mark.usefixtures("ask_here")
def test_missing_code_of_a_type_that_transformers_does_not_know_is_no_model_for_it(tmp_path: Path) -> None:
    names = {"AutoConfig": "configuration_net.NetConfig", "AutoModelForCausalLM": "modeling_net.Net"}
    source = saved(tmp_path / "in", "Starcoder2", auto_map=names, model_type="net", architectures=["Net"])
    (source / "configuration_net.py").write_text("")
    assert cli("merge", source, tmp_path / "merged").having("FS101", severity="warning")
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert ran.code == 3 and ran.having("FS101", severity="error", file="modeling_net.py"), ran.out
    (source / "modeling_net.py").write_text("")
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert ran.code == 0 and (tmp_path / "out/modeling_net.py").exists(), ran.out
    # A class that is known is loaded without its code.
    known = saved(tmp_path / "known", "Starcoder2", auto_map=names)
    assert cli("convert", known, tmp_path / "known_out", "--to", "hf").code == 0


def embedder(folder: Path) -> Path:
    """A model of sentence-transformers, whose last modules have folders of their own, and one of them
    weights."""
    config = transformers.BertConfig(**SIZES)
    transformers.BertModel(config).save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text("{}")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"in_features": 32}')
    save_file({"linear.weight": torch.randn(8, 32)}, folder / "2_Dense/model.safetensors")
    return folder


@pytest.mark.parametrize("verb", [("merge",), ("convert", "--to", "hf")])
def test_modules_of_an_embedding_model_go_along(verb: tuple[str, ...], tmp_path: Path) -> None:
    source, out = embedder(tmp_path / "in"), tmp_path / "out"
    ran = cli(verb[0], source, out, *verb[1:])
    assert ran.code == 0, ran.out
    for path in source.rglob("*"):
        if path.is_file() and path.name != "config.json" and path.parent != source:
            assert (out / path.relative_to(source)).read_bytes() == path.read_bytes()
    assert (out / "modules.json").read_bytes() == (source / "modules.json").read_bytes()
    assert (out / "sentence_bert_config.json").is_file()
    assert cli("verify", out).code == 0
    dense = out / "2_Dense/model.safetensors"
    dense.write_bytes(dense.read_bytes()[:-1] + b"x")
    ran = cli("verify", out)
    assert ran.code == 1 and [f["file"] for f in ran.errors] == ["2_Dense/model.safetensors"], ran.out


def test_a_module_that_is_missing_is_named_and_nothing_outside_is_read(tmp_path: Path) -> None:
    source = embedder(tmp_path / "in")
    shutil.rmtree(source / "2_Dense")
    for command in (("verify", source), ("merge", source, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 0
        assert [f["file"] for f in ran.having("FS101", severity="warning")] == ["2_Dense/config.json"]
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("key")
    rows = [
        {"path": path, "type": "x.Dense"} for path in ("../secret", str(tmp_path / "secret"), "link", ".", 3)
    ]
    (source / "link").symlink_to(tmp_path / "secret")
    (source / "modules.json").write_text(json.dumps(rows))
    ran = cli("merge", source, tmp_path / "other")
    assert not (tmp_path / "other").exists() or not list((tmp_path / "other").rglob("key")), ran.out
    for text in ("[", "3", "null", '[{"path": []}]', "[" * 100_000):
        (source / "modules.json").write_text(text)
        assert cli("merge", source, tmp_path / "other", "--overwrite").code == 0


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


UNKNOWN = {"model_type": "odd", "architectures": ["OddForCausalLM"]}


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize(
    ("kind", "config", "remove", "severity"),
    [
        # A family that nothing here lists.
        ("Starcoder2", UNKNOWN, ("tie_word_embeddings",), "warning"),
        ("Starcoder2", UNKNOWN | {"tie_word_embeddings": None}, (), "warning"),
        ("Starcoder2", UNKNOWN | {"tie_word_embeddings": True}, (), "error"),
        (
            "Starcoder2",
            UNKNOWN | {"text_config": {"tie_word_embeddings": True}},
            ("tie_word_embeddings",),
            "error",
        ),
        ("Starcoder2", UNKNOWN | {"tie_word_embeddings": False}, (), None),
        ("Starcoder2", {"tie_word_embeddings": True}, (), "error"),
        # A family whose table says that it does not tie by default.
        ("Llama", {}, ("tie_word_embeddings",), None),
        ("Llama", {"tie_word_embeddings": True}, (), "error"),
    ],
)
def test_a_head_that_nothing_lists_is_held_against_the_embedding(
    kind: str,
    config: dict[str, Any],
    remove: tuple[str, ...],
    severity: str | None,
    differs: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("FASTSHARD_TRANSFORMERS", "off")
    source = retied(
        saved(tmp_path / "in", kind, remove=remove, **config), torch.ones(64, 32) if differs else None
    )
    wanted = [severity] if differs and severity else []
    for command in (("verify", source), ("merge", source, tmp_path / "out")):
        ran = cli(*command)
        assert {f["severity"] for f in ran.having("FS311")} == set(wanted), ran.out
        assert ran.code == (1 if wanted == ["error"] else 0), ran.out
    assert (tmp_path / "out").exists() == (wanted != ["error"])


def test_a_head_of_another_kind_is_not_held_against_the_embedding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FASTSHARD_TRANSFORMERS", "off")
    folder = saved(tmp_path / "in", "Starcoder2", remove=("tie_word_embeddings",), **UNKNOWN)
    for name, more in {
        "smaller": {"lm_head.weight": torch.ones(2, 32)},
        "several": {f"{start}lm_head.weight": torch.ones(64, 32) for start in ("", "audio.")},
        "codes": {"lm_head.weight": torch.ones(64, 32, dtype=torch.int8)},
    }.items():
        tensors = load_file(folder / "model.safetensors") | more
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        (tmp_path / name / "config.json").write_text((folder / "config.json").read_text())
        assert not cli("verify", tmp_path / name).having("FS311"), name


def test_a_head_in_a_dcp_is_held_against_the_embedding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FASTSHARD_TRANSFORMERS", "off")
    folder = saved(tmp_path / "hf", "Starcoder2", remove=("tie_word_embeddings",), **UNKNOWN)
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": torch.ones(64, 32)}
    dcp.save(tensors, checkpoint_id=tmp_path / "in", no_dist=True)
    (tmp_path / "in/config.json").write_text((folder / "config.json").read_text())
    ran = cli("merge", tmp_path / "in", tmp_path / "out")
    assert ran.code == 0 and ran.having("FS311", severity="warning"), ran.out


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
