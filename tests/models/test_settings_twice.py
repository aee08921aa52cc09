"""One setting stated twice: under two keys of one config, or by the checkpoint and by --config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from fastshard import FastshardError
from fastshard.models import maxtext_sizes
from fastshard.models.repeated_settings import ALIASES, find_repeated_settings
from helpers import cli
from tiny_models import model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=64)
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)
    ),
    "gpt_neo": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=4, vocab_size=64, attention_types=[[["global"], 2]]
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=4, head_dim=8)
    ),
}


def save(folder: Path, kind: str, **config: Any) -> Path:
    """A model as save_pretrained writes it, with other keys in its config."""
    torch.manual_seed(5)
    MODELS[kind]().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **values}


@pytest.mark.parametrize(
    ("kind", "config", "keys"),
    [
        ("gpt2", {"hidden_size": 64}, ("hidden_size", "n_embd")),
        ("gpt2", {"num_hidden_layers": 3}, ("n_layer", "num_hidden_layers")),
        ("gpt2", {"num_attention_heads": 8}, ("n_head", "num_attention_heads")),
        ("gpt2", {"max_position_embeddings": 128}, ("max_position_embeddings", "n_positions")),
        ("bloom", {"num_attention_heads": 8}, ("n_head", "num_attention_heads")),
        ("gpt_neo", {"num_hidden_layers": 4}, ("num_hidden_layers", "num_layers")),
        ("llama", {"dtype": "float32", "torch_dtype": "bfloat16"}, ("dtype", "torch_dtype")),
        ("llama", {"rope_theta": 5e5}, ("rope_theta", "rope_parameters.rope_theta")),
        (
            "llama",
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": rope()},
            ("rope_theta", "rope_scaling.rope_theta"),
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ("rope_parameters.rope_type", "rope_scaling.rope_type"),
        ),
        (
            "llama",
            {
                "rope_parameters": rope(rope_type="linear", factor=4.0),
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            ("rope_parameters.factor", "rope_scaling.factor"),
        ),
        (
            "llama",
            {"partial_rotary_factor": 0.5, "rope_parameters": rope(partial_rotary_factor=1.0)},
            ("partial_rotary_factor", "rope_parameters.partial_rotary_factor"),
        ),
        ("gemma3", {"rope_theta": 2e6}, ("rope_theta", "rope_parameters.full_attention.rope_theta")),
        (
            "gemma3",
            {"rope_local_base_freq": 2e4},
            ("rope_local_base_freq", "rope_parameters.sliding_attention.rope_theta"),
        ),
    ],
)
def test_two_keys_of_one_setting_must_agree(
    kind: str, config: dict[str, Any], keys: tuple[str, str], tmp_path: Path
) -> None:
    source = save(tmp_path / "in", kind, **config)
    for command in (
        ("verify", source),
        ("merge", source, tmp_path / "out"),
        ("convert", source, tmp_path / "hf", "--to", "hf"),
    ):
        ran = cli(*command)
        assert ran.code == 1, (command[0], ran.out)
        (found,) = ran.having("FS215", severity="error")
        assert found["file"] == "config.json"
        assert (found["expected"].split(":")[0], found["got"].split(":")[0]) == keys
    assert not (tmp_path / "out").exists() and not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt2", {"hidden_size": 32, "num_hidden_layers": 2, "n_ctx": 1024, "max_position_embeddings": 64}),
        ("gpt2", {"hidden_size": None}),
        ("llama", {"dtype": "bfloat16", "torch_dtype": "torch.bfloat16"}),
        ("llama", {"rope_theta": 10000}),
        (
            "llama",
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (
            "llama",
            {
                "rope_parameters": None,
                "rope_theta": 1e4,
                "rope_scaling": {"type": "su", "rope_type": "longrope", "factor": 2.0},
            },
        ),
        ("llama", {"head_dim": 8, "quantised_from": {"dtype": "float64"}}),
        ("gemma3", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    ],
)
def test_keys_that_agree_or_mean_other_things_are_taken(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    source = save(tmp_path / "in", kind, **config)
    for command in (("verify", source), ("merge", source, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 0, (command[0], ran.out)
        assert not ran.having("FS215")


def test_a_key_that_the_class_passes_over_is_a_warning(tmp_path: Path) -> None:
    source = save(tmp_path / "in", "llama", n_embd=64)
    ran = cli("merge", source, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert [f["got"] for f in ran.having("FS215")] == ["n_embd: 64"]


def test_parts_of_a_config_are_looked_at_one_by_one() -> None:
    inner = {"model_type": "gpt2", "n_embd": 32, "hidden_size": 64, "dtype": "float32"}
    config = {"model_type": "other", "dtype": "bfloat16", "hidden_size": 16, "a_config": {"b_config": inner}}
    (found,) = find_repeated_settings(config, "config.json")
    assert (found.expected, found.got) == (
        "a_config.b_config.hidden_size: 64",
        "a_config.b_config.n_embd: 32",
    )


def test_code_of_its_own_may_read_its_keys_otherwise() -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "hidden_size": 64, "auto_map": {"AutoModel": "net.Net"}}
    assert [finding.severity for finding in find_repeated_settings(config, "config.json")] == ["warning"]


def test_aliases_are_those_of_transformers() -> None:
    for pair, types in ALIASES.items():
        for model_type in types.split():
            if model_type in CONFIG_MAPPING:
                found = CONFIG_MAPPING[model_type].attribute_map
                assert pair in found.items() or pair[::-1] in found.items(), (pair, model_type)


def test_no_config_of_transformers_contradicts_itself() -> None:
    accused = {}
    for model_type in CONFIG_MAPPING:
        try:
            made = CONFIG_MAPPING[model_type]()
        except Exception:
            continue
        if found := find_repeated_settings(json.loads(made.to_json_string(use_diff=False)), "config.json"):
            accused[model_type] = found
    assert not accused


#: What --config states otherwise than the model that is converted, and the keys of the written config.json.
OTHERWISE = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-3,
    "sliding_window": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


def write_config(folder: Path, to: Path, **config: Any) -> Path:
    to.write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return to


def noted(ran: Any) -> dict[str, tuple[str, str]]:
    """Settings that --config overrides: its value, and that of the checkpoint."""
    notes = ran.having("FS215", severity="note")
    keys = [f["message"].split(":")[0] for f in notes]
    assert len(set(keys)) == len(keys)
    pairs = [(f["expected"].rpartition(", as ")[0], f["got"].rpartition(", as ")[0]) for f in notes]
    return dict(zip(keys, pairs, strict=True))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    model("mistral", folder / "hf")
    return folder / "hf"


@pytest.mark.parametrize("form", ["megatron:legacy", "megatron:torch_dist"])
def test_config_goes_before_arguments_of_megatron(form: str, mistral: Path, tmp_path: Path) -> None:
    source = tmp_path / "megatron"
    assert cli("convert", mistral, source, "--to", form, "--tp", 2).code == 0
    given = write_config(mistral, tmp_path / "given.json", **OTHERWISE)
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--config", given)
    assert ran.code == 0, ran.out
    assert noted(ran) == {
        "args.max_position_embeddings": ("4096", "64"),
        "args.norm_epsilon": ("0.001", "1e-06"),
        "args.rotary_base": ("500000", "10000"),
        "args.window_size": ("[6, 0]", "[4, 0]"),
    }
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["max_position_embeddings"], written["rms_norm_eps"]) == (4096, 1e-3)
    # Rows are dropped by --vocab-size alone: a base's config does not know the tokens that were added.
    assert (written["rope_theta"], written["sliding_window"], written["vocab_size"]) == (5e5, 7, 256)
    # The arguments that are written are those of --config.
    assert cli("convert", source, tmp_path / "again", "--to", form, "--config", given).code == 0
    assert cli("convert", tmp_path / "again", tmp_path / "back", "--to", "hf").code == 0
    assert json.loads((tmp_path / "back/config.json").read_text())["rope_theta"] == 5e5


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_a_tie_that_the_tensors_of_megatron_contradict_is_refused(family: str, tmp_path: Path) -> None:
    plain, source = tmp_path / "hf", tmp_path / "megatron"
    model(family, plain)
    assert cli("convert", plain, source, "--to", "megatron:legacy", "--tp", 2).code == 0
    for tied in (True, False):
        given = write_config(plain, tmp_path / "given.json", tie_word_embeddings=tied)
        out = tmp_path / f"out{tied}"
        ran = cli("convert", source, out, "--to", "hf", "--config", given)
        if tied is (family == "llama_tied"):
            assert ran.code == 0 and not noted(ran), ran.out
            assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is tied
        else:
            assert ran.code in (1, 3) and ran.errors, ran.out
            assert bool(ran.having("FS215", severity="error")) is tied and not out.exists()


def test_config_may_be_arguments_of_megatron(mistral: Path, tmp_path: Path) -> None:
    source = tmp_path / "megatron"
    assert cli("convert", mistral, source, "--to", "megatron:legacy").code == 0
    (tmp_path / "args.yml").write_text(
        "rotary-base: 1000\nnorm_epsilon: 0.01\ntensor_model_parallel_size: 8\n"
    )
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--config", tmp_path / "args.yml")
    assert ran.code == 0, ran.out
    assert noted(ran).keys() == {"args.rotary_base", "args.norm_epsilon"}
    assert json.loads((tmp_path / "out/config.json").read_text())["rope_theta"] == 1000
    (tmp_path / "none.yml").write_text("learning_rate: 1\n")
    ran = cli("convert", source, tmp_path / "none", "--to", "hf", "--config", tmp_path / "none.yml")
    assert ran.code == 2 and ran.having("FS211"), ran.out


def test_a_key_that_stands_twice_in_a_yaml_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "neox"
    assert cli("convert", save(tmp_path / "hf", "llama"), source, "--to", "gpt_neox").code == 0
    (file,) = source.glob("global_step*/configs/*.yml")
    text = yaml.safe_dump(yaml.safe_load(file.read_text()))
    anchors = "base: &base {x: 1}\nnested: &more\n  <<: *base\n  x: 2\nboth:\n  <<: *more\n  x: 3\n"
    for more, code in (
        ("rotary_emb_base: 500000\n", 2),
        (f"rotary_emb_base: {yaml.safe_load(text)['rotary_emb_base']}\n", 0),
        (anchors, 0),
        ("nested:\n  x: 1\n  x: [1]\n", 2),
    ):
        (tmp_path / "given.yml").write_text(text + more)
        ran = cli("inspect", source, "--config", tmp_path / "given.yml")
        assert ran.code == code and bool(ran.having("FS211", message="twice")) == bool(code), ran.out


@pytest.mark.parametrize("verb", ["merge", "convert"])
def test_what_no_argument_states_is_refused_where_it_matters(
    verb: str, mistral: Path, tmp_path: Path
) -> None:
    source = tmp_path / "megatron"
    assert cli("convert", mistral, source, "--to", "megatron:legacy").code == 0
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    given = write_config(mistral, tmp_path / "given.json", rope_parameters=scaled)
    to = () if verb == "merge" else ("--to", "hf")
    ran = cli(verb, source, tmp_path / "out", *to, "--config", given)
    assert ran.code == (0 if verb == "merge" else 2), ran.out
    assert bool(ran.having("FS514", severity="error")) == (verb == "convert")


@pytest.mark.parametrize("to", ["megatron:legacy", "gpt_neox"])
def test_a_config_that_the_tensors_contradict_is_refused(to: str, mistral: Path, tmp_path: Path) -> None:
    source, plain = tmp_path / "source", tmp_path / "plain"
    shutil.copytree(mistral, plain)
    write_config(plain, plain / "config.json", sliding_window=None)
    if to == "gpt_neox":
        plain = save(tmp_path / "llama", "llama")
    assert cli("convert", plain, source, "--to", to, "--tp", 2).code == 0
    for sizes in (
        {"hidden_size": 128, "head_dim": 16},
        {"intermediate_size": 48},
        {"num_hidden_layers": 3},
        {"vocab_size": 300},
    ):
        given = write_config(plain, tmp_path / "given.json", **sizes)
        ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--config", given)
        assert ran.code in (1, 3) and ran.errors, (sizes, ran.out)
        assert not (tmp_path / "out").exists()


def test_config_goes_before_what_gpt_neox_saved(tmp_path: Path) -> None:
    llama = save(tmp_path / "hf", "llama")
    source = tmp_path / "neox"
    assert cli("convert", llama, source, "--to", "gpt_neox", "--tp", 2).code == 0
    given = write_config(llama, tmp_path / "given.json", **OTHERWISE | {"sliding_window": None})
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--config", given)
    assert ran.code == 0, ran.out
    assert noted(ran) == {
        "max_position_embeddings": ("4096", "64"),
        "rms_norm_epsilon": ("0.001", "1e-06"),
        "rotary_emb_base": ("500000.0", "10000"),
    }
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["max_position_embeddings"], written["rms_norm_eps"]) == (4096, 1e-3)
    assert (written["rope_theta"], written["vocab_size"]) == (5e5, 256)
    # A training config in full, which the arguments in the files contradict.
    (file,) = source.glob("global_step*/configs/*.yml")
    own = yaml.safe_load(file.read_text())
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(own | {"max_position_embeddings": 128}))
    ran = cli("convert", source, tmp_path / "mine", "--to", "hf", "--config", tmp_path / "mine.yml")
    assert ran.code == 0, ran.out
    assert noted(ran) == {"max_position_embeddings": ("128", "64")}
    assert json.loads((tmp_path / "mine/config.json").read_text())["max_position_embeddings"] == 128


def test_config_goes_before_the_yml_beside_a_maxtext_run(tmp_path: Path) -> None:
    llama = save(tmp_path / "hf", "llama")
    source = tmp_path / "maxtext"
    assert cli("convert", llama, source, "--to", "maxtext", "--rope-type", "default").code == 0
    (yml,) = source.rglob("maxtext_model.yml")
    yml.write_text(yml.read_text() + "max_target_length: 32\n")
    given = write_config(llama, tmp_path / "given.json", **OTHERWISE | {"sliding_window": None})
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--config", given)
    assert ran.code == 0, ran.out
    assert noted(ran) == {
        "max_target_length": ("4096", "32"),
        "normalization_layer_epsilon": ("0.001", "1e-06"),
        "rope_max_timescale": ("500000.0", "10000"),
    }
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 4096


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_config_goes_before_the_config_json_of_the_checkpoint(form: str, tmp_path: Path) -> None:
    source = save(tmp_path / "hf", "llama")
    if form == "dcp":
        assert cli("convert", source, tmp_path / "dcp", "--to", "dcp").code == 0
        source = tmp_path / "dcp"
        shutil.copy(tmp_path / "hf/config.json", source)
    given = write_config(
        source,
        tmp_path / "given.json",
        rope_theta=5e5,
        rope_parameters=None,
        max_position_embeddings=128,
        use_cache=False,
    )
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--config", given)
    assert ran.code == 0, ran.out
    assert noted(ran) == {"rope_theta": ("500000.0", "10000.0"), "max_position_embeddings": ("128", "64")}
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 128
    assert not noted(cli("verify", source, "--config", source / "config.json"))
    # What is wrong with the checkpoint's own config is why another one is given.
    (source / "config.json").write_text("{")
    assert cli("convert", source, tmp_path / "mended", "--to", "hf", "--config", given).code == 0


def test_a_key_must_not_stand_twice_in_a_config(tmp_path: Path) -> None:
    source = save(tmp_path / "in", "llama")
    text = (source / "config.json").read_text()
    for twice, code in (('"hidden_size": 32', 0), ('"hidden_size": 64', 2)):
        (source / "config.json").write_text(text.replace("{", "{" + twice + ",", 1))
        for options in ((), ("--config", source / "config.json")):
            ran = cli("merge", source, tmp_path / f"out{code}{len(options)}", *options)
            assert ran.code == code, ran.out
            assert bool(ran.having("FS211")) == bool(code)


@pytest.mark.parametrize(("other", "code"), [(32, 0), (48, 1)])
def test_both_spellings_of_a_key_of_a_training_config_must_agree(
    other: int, code: int, tmp_path: Path
) -> None:
    source = tmp_path / "neox"
    assert cli("convert", save(tmp_path / "hf", "llama"), source, "--to", "gpt_neox").code == 0
    (file,) = source.glob("global_step*/configs/*.yml")
    mine = yaml.safe_load(file.read_text()) | {"hidden-size": other}
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(mine))
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--config", tmp_path / "mine.yml")
    assert ran.code == code, ran.out
    assert [f["got"] for f in ran.having("FS215", severity="error")] == ["hidden_size: 32"] * code


@pytest.mark.parametrize(("scale", "product"), [(1, 32), (8, 64)])
def test_products_of_a_yml_are_taken_where_they_are_those_of_its_bases(scale: int, product: int) -> None:
    yml = {"base_emb_dim": 32, "emb_dim": product, "global_parameter_scale": scale}
    assert maxtext_sizes.sizes(yml)["emb_dim"] == product


def test_products_of_a_yml_must_be_those_of_its_bases() -> None:
    with pytest.raises(FastshardError) as error:
        maxtext_sizes.sizes({"base_emb_dim": 32, "emb_dim": 64})
    assert [(f.code, f.got) for f in error.value.findings] == [("FS215", "emb_dim: 64")]
