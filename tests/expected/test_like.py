"""``--like``: a checkpoint against a good one of the same model, by headers alone. Models have no layout
table here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import dtensor_maker
import fastshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import zero_maker
from fastshard import _core
from fastshard.conversion.distributed.split_runs import commit, make_part, split
from helpers import NEOX, Ran, assert_refused, cli, copy, edit_safetensors, read_result
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
CONFIGS = {
    "phi": transformers.PhiConfig(**SIZES),
    "gpt2": transformers.GPT2Config(vocab_size=120, n_embd=32, n_layer=4, n_head=4, n_positions=24),
    "opt": transformers.OPTConfig(
        vocab_size=120,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=24,
    ),
    "falcon": transformers.FalconConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=4, num_attention_heads=4
    ),
    "bert": transformers.BertConfig(**SIZES, max_position_embeddings=24),
    "t5": transformers.T5Config(vocab_size=120, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4),
}
AUTO = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
INDEX = "model.safetensors.index.json"


def model(name: str, **changes: Any) -> Any:
    torch.manual_seed(7)
    # A copy: `to` and `save_pretrained` write a model's dtype into its config, which is all tests' here.
    config = deepcopy(CONFIGS[name])
    for key, value in changes.items():
        setattr(config, key, value)
    return AUTO.get(name, transformers.AutoModelForCausalLM).from_config(config)


def saved(name: str, folder: Path, made: Any = None, **options: Any) -> Path:
    (made or model(name)).save_pretrained(folder, **options)
    return folder


@pytest.fixture
def phi(tmp_path: Path) -> Path:
    """A good checkpoint of a model without a table, with a tokenizer and what else lies beside it."""
    folder = saved("phi", tmp_path / "good")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}}}))
    return folder


def errors(ran: Ran) -> list[tuple[str, str | None]]:
    return [(f["code"], f.get("tensor")) for f in ran.errors]


def proven(ran: Ran) -> bool:
    """That the reference is said to prove what it proves, and nothing says that nothing does."""
    told = ran.having("FS109", message="order of heads, and values")
    unproven = [
        f
        for f in ran.having("FS109")
        if "only partly checked" in f["message"] or "no table shows" in f["message"]
    ]
    return len(told) == 1 and not unproven


def damaged(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    edit_safetensors(folder / "model.safetensors", change)
    return folder


# --- good checkpoints: nothing is wrong


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_good_checkpoint_is_like_itself_however_it_is_saved(name: str, tmp_path: Path) -> None:
    good = saved(name, tmp_path / "good")
    made = model(name)
    (tmp_path / "bin").mkdir()
    torch.save(made.state_dict(), tmp_path / "bin/pytorch_model.bin")
    shutil.copy(good / "config.json", tmp_path / "bin")
    dcp.save({"model": made.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    compiled = {f"_orig_mod.{n}": t for n, t in made.state_dict().items()}
    dcp.save({"model": compiled}, checkpoint_id=tmp_path / "compiled", no_dist=True)
    others = [
        saved(name, tmp_path / "shards", max_shard_size="30KB"),
        tmp_path / "bin",
        tmp_path / "dcp",
        tmp_path / "compiled",
    ]
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for other in others:
        for one, reference in ((other, good), (good, other)):
            ran = cli("inspect", one, "--like", reference)
            assert ran.code == 0 and not ran.errors and not ran.having("FS202"), (
                one,
                reference,
                ran.findings,
            )
            assert ran.doc["complete"] and proven(ran), (one, reference, ran.findings)


@pytest.mark.parametrize("name", ["phi", "gpt2", "bert"])
def test_a_cast_is_one_note(name: str, tmp_path: Path) -> None:
    good = saved(name, tmp_path / "good")
    half = saved(name, tmp_path / "half", model(name).to(torch.bfloat16))
    ran = cli("verify", half, "--like", good)
    assert ran.code == 0, ran.out
    (told,) = ran.having("FS202")
    assert (told["severity"], told["expected"], told["got"]) == ("note", "F32", "BF16")
    # A cast that is asked for is none.
    ran = cli("convert", good, tmp_path / "out", "--to", "hf", "--dtype", "bf16", "--like", half)
    assert ran.code == 0 and not ran.having("FS202"), ran.out
    ran = cli("plan", good, "--to", "hf", "--dtype", "bf16", "--like", saved(name, tmp_path / "again"))
    assert ran.code == 0 and not ran.having("FS202"), ran.out


@pytest.mark.parametrize(
    ("name", "prefix"), [("gpt2", "transformer"), ("bert", "bert"), ("phi", "model"), ("opt", "model")]
)
def test_a_model_without_its_head_is_read_by_one_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    good = saved(name, tmp_path / "good")
    base = getattr(model(name), prefix)
    base.save_pretrained(tmp_path / "base")
    kept = {n for n in load_file(good / "model.safetensors") if n.startswith(f"{prefix}.")}
    rest = sorted(set(load_file(good / "model.safetensors")) - kept)
    ran = cli("inspect", tmp_path / "base", "--like", good)
    # The head that the reference stores is missing, and nothing else.
    assert [n for _, n in errors(ran)] == [n for n in rest if "pooler" not in n], ran.findings
    assert {code for code, _ in errors(ran)} <= {"FS102"}
    if not rest:
        assert f"with the prefix '{prefix}.'" in ran.having("FS109")[0]["message"]
    ran = cli("inspect", good, "--like", tmp_path / "base")
    more = {f["tensor"] for f in ran.errors if f["code"] == "FS207"}
    assert more == set(rest)


@pytest.mark.parametrize("here", [False, True])
def test_a_prefix_that_is_not_certain_is_not_guessed(here: bool, tmp_path: Path) -> None:
    """Two parts of one checkpoint that are named alike: of which of them another one is nothing tells."""
    names = [f"{n}.weight" for n in "abcd"]
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file({n: torch.zeros(2, 3) for n in names}, one)
    save_file({f"net.{more}{n}": torch.zeros(2, 3) for more in ("", "net.") for n in names}, two)
    ran = cli("inspect", *((two, "--like", one) if here else (one, "--like", two)))
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS106"], ran.findings
    assert "'net.'" in ran.errors[0]["got"] and "'net.net.'" in ran.errors[0]["got"]
    # One of them alone is certain.
    save_file({f"net.{n}": torch.zeros(2, 3) for n in names}, two)
    assert cli("inspect", *((two, "--like", one) if here else (one, "--like", two))).code == 0


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert", "t5"])
def test_tied_tensors_that_one_side_stores_are_no_difference(name: str, tmp_path: Path) -> None:
    good = saved(name, tmp_path / "good")
    state = model(name).state_dict()
    further = set(state) - set(load_file(good / "model.safetensors"))
    assert further
    dcp.save(state, checkpoint_id=tmp_path / "all", no_dist=True)
    ran = cli("inspect", tmp_path / "all", "--like", good)
    assert not ran.errors and ran.having("FS212", message="ties them to"), ran.findings
    ran = cli("inspect", good, "--like", tmp_path / "all")
    assert not ran.errors, ran.findings


def test_a_head_that_is_not_said_to_be_tied_is_missed(tmp_path: Path) -> None:
    made = model("gpt2", tie_word_embeddings=False)
    good = saved("gpt2", tmp_path / "good", made)
    bad = damaged(copy(good, tmp_path / "bad"), lambda t: t.pop("lm_head.weight"))
    assert errors(cli("inspect", bad, "--like", good)) == [("FS102", "lm_head.weight")]
    for folder in (good, bad):
        config = json.loads((folder / "config.json").read_text())
        del config["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(config))
    assert errors(cli("inspect", bad, "--like", good)) == [("FS102", "lm_head.weight")]


def test_an_embedding_stored_as_the_head_alone_is_warned_about(tmp_path: Path) -> None:
    state = model("opt").state_dict()
    good = saved("opt", tmp_path / "good")
    dcp.save(state, checkpoint_id=tmp_path / "all", no_dist=True)
    del state["model.decoder.embed_tokens.weight"]
    shutil.copytree(good, tmp_path / "head")
    save_file(
        {n: t.clone() for n, t in state.items()},
        tmp_path / "head/model.safetensors",
        metadata={"format": "pt"},
    )
    ran = cli("inspect", tmp_path / "head", "--like", tmp_path / "all")
    assert not ran.errors
    (told,) = ran.having("FS102")
    assert told["severity"] == "warning" and told["tensor"] == "model.decoder.embed_tokens.weight"


def test_buffers_that_transformers_computes_are_a_note(tmp_path: Path) -> None:
    good = saved("gpt2", tmp_path / "good")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for n in range(4):
            tensors[f"transformer.h.{n}.attn.bias"] = torch.ones(1, 1, 24, 24)
            tensors[f"transformer.h.{n}.attn.masked_bias"] = torch.tensor(-1e4)

    old = damaged(copy(good, tmp_path / "old"), add)
    ran = cli("verify", old, "--like", good)
    assert ran.code == 0 and "8 tensors" in ran.having("FS212", message="buffers")[0]["message"], ran.findings
    assert cli("verify", good, "--like", old).code == 0
    # A bias is none.
    wide = damaged(
        copy(good, tmp_path / "wide"), lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(32)})
    )
    assert errors(cli("verify", wide, "--like", good)) == [("FS207", "transformer.h.0.attn.bias")]


# --- damage


def test_a_tensor_that_is_gone_from_file_and_index(phi: Path, tmp_path: Path) -> None:
    lost = "model.layers.2.mlp.fc1.bias"
    bad = saved("phi", tmp_path / "bad", max_shard_size="30KB")
    index = json.loads((bad / INDEX).read_text())
    file = index["weight_map"].pop(lost)
    (bad / INDEX).write_text(json.dumps(index))
    edit_safetensors(bad / file, lambda t: t.pop(lost))
    ran = cli("verify", bad, "--like", phi)
    assert ran.code == 3 and errors(ran) == [("FS102", lost)]
    assert ran.errors[0]["expected"] == "[48]"
    options = ("--like", phi)
    assert_refused(bad, tmp_path / "out", "FS102", exit=3, options=options, tensor=lost)
    assert_refused(
        bad,
        tmp_path / "out",
        "FS102",
        exit=3,
        command=("convert", "--to", "hf"),
        options=options,
        tensor=lost,
    )


def test_a_shard_that_is_gone_with_its_index(phi: Path, tmp_path: Path) -> None:
    bad = saved("phi", tmp_path / "bad", max_shard_size="30KB")
    index = json.loads((bad / INDEX).read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    lost = {n for n, file in index["weight_map"].items() if file == gone}
    (bad / gone).unlink()
    ran = cli("verify", bad, "--like", phi)
    assert {code for code, _ in errors(ran)} == {"FS101"}, "the cause alone is told"
    # As files of no index.
    (bad / INDEX).unlink()
    rest = list(bad.glob("*.safetensors"))
    whole = {n: t for file in rest for n, t in load_file(file).items()}
    for file in rest:
        file.unlink()
    save_file(whole, bad / "model.safetensors", metadata={"format": "pt"})
    ran = cli("verify", bad, "--like", phi)
    layers = {i for i in range(4) if not any(n.startswith(f"model.layers.{i}.") for n in whole)}
    assert [f["message"].split(":")[0] for f in ran.having("FS103")] == [
        f"layer model.layers.{i}" for i in layers
    ]
    assert lost and {f["tensor"] for f in ran.having("FS102")} == {
        n for n in lost if not any(n.startswith(f"model.layers.{i}.") for i in layers)
    }


def test_whole_layers_are_a_finding_each(phi: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(("model.layers.1.", "model.layers.3."))]:
            del tensors[name]

    bad = damaged(copy(phi, tmp_path / "bad"), cut)
    ran = cli("verify", bad, "--like", phi)
    assert [(f["code"], f["message"][:22]) for f in ran.errors] == [
        ("FS103", "layer model.layers.1: "),
        ("FS103", "layer model.layers.3: "),
    ]
    assert "4 layers, by the checkpoint's own config, 4 by the reference's" in ran.errors[0]["got"]


def test_half_the_embedding_saved_as_the_whole(phi: Path, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.update({name: t[name][:60]}))
    ran = cli("verify", bad, "--like", phi)
    assert ran.code == 1 and errors(ran) == [("FS208", name)]
    assert "one of 2 tensor-parallel slices" in ran.errors[0]["message"]
    assert (ran.errors[0]["expected"], ran.errors[0]["got"]) == ("[120, 32]", "[60, 32]")


def test_a_transposed_matrix(phi: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.fc1.weight"
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.update({name: t[name].T}))
    ran = cli("verify", bad, "--like", phi)
    assert errors(ran) == [("FS201", name)] and "is its transpose" in ran.errors[0]["message"]


def test_a_layer_of_another_model(phi: Path, tmp_path: Path) -> None:
    other = model("phi", hidden_size=40, intermediate_size=50).state_dict()
    layer = {n: t for n, t in other.items() if n.startswith("model.layers.2.")}
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.update(layer))
    ran = cli("verify", bad, "--like", phi)
    assert ran.code == 1 and {n for _, n in errors(ran)} == set(layer)
    assert {code for code, _ in errors(ran)} == {"FS201"}


def test_single_dtypes_warn_and_other_elements_are_refused(phi: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.fc2.weight"
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.update({name: t[name].half()}))
    ran = cli("verify", bad, "--like", phi)
    assert ran.code == 0
    assert [(f["severity"], f["tensor"], f["got"]) for f in ran.having("FS202")] == [("warning", name, "F16")]
    bad = damaged(copy(phi, tmp_path / "int"), lambda t: t.update({name: t[name].to(torch.int8)}))
    assert errors(cli("verify", bad, "--like", phi)) == [("FS202", name)]
    assert_refused(bad, tmp_path / "out", "FS202", options=("--like", phi), tensor=name)


@pytest.mark.parametrize("command", [("merge",), ("convert", "--to", "hf")])
def test_what_the_reference_has_not_is_refused_and_left_out_if_asked(
    command: tuple[str, ...], phi: Path, tmp_path: Path
) -> None:
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.update({"value_head.weight": torch.ones(1, 32)}))
    assert errors(cli("verify", bad, "--like", phi)) == [("FS207", "value_head.weight")]
    ran = assert_refused(
        bad, tmp_path / "out", "FS207", command=command, options=("--like", phi), tensor="value_head.weight"
    )
    assert "--exclude" in ran.errors[0]["help"]
    ran = cli(command[0], bad, tmp_path / "out", *command[1:], "--like", phi, "--exclude", "value_head.*")
    assert (
        ran.code == 0 and read_result(tmp_path / "out").keys() == load_file(phi / "model.safetensors").keys()
    )


def test_what_is_not_asked_for_is_not_judged(phi: Path, tmp_path: Path) -> None:
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.pop("model.layers.2.mlp.fc1.bias"))
    assert cli("plan", bad, "--like", phi, "--include", "model.layers.1.*").code == 0
    assert cli("plan", bad, "--like", phi, "--include", "model.layers.2.*").code == 3
    assert cli("plan", bad, "--like", phi, "--exclude", "model.layers.2.*").code == 0


def test_another_model_is_one_finding(phi: Path, tmp_path: Path) -> None:
    ran = cli("verify", saved("gpt2", tmp_path / "gpt2"), "--like", phi)
    assert ran.code == 1 and len(ran.errors) == 1 and "another model" in ran.errors[0]["message"]


def test_many_tensors_are_not_all_told(tmp_path: Path) -> None:
    tensors = {f"part.{chr(97 + i % 26)}{i}": torch.zeros(1) for i in range(400)}
    save_file(tensors, tmp_path / "good.safetensors")
    save_file(dict(list(tensors.items())[150:]), tmp_path / "bad.safetensors")
    ran = cli("inspect", tmp_path / "bad.safetensors", "--like", tmp_path / "good.safetensors")
    assert len(ran.errors) == 101 and ran.errors[-1]["message"] == "and 50 more tensors that are missing"
    assert "one of 150 tensors" in ran.errors[0]["message"]


# --- differences that a config explains


@pytest.mark.parametrize("name", ["phi", "gpt2", "opt", "t5", "bert"])
def test_a_resized_vocabulary_is_a_note(name: str, tmp_path: Path) -> None:
    good = saved(name, tmp_path / "good")
    for rows in (128, 60):
        made = model(name)
        made.resize_token_embeddings(rows)
        ran = cli("verify", saved(name, tmp_path / str(rows), made), "--like", good)
        assert ran.code == 0, ran.findings
        (told,) = ran.having("FS212", message="as many rows")
        assert told["got"].startswith(f"vocab_size {rows}, by the checkpoint")


def test_a_vocabulary_that_no_config_explains(phi: Path, tmp_path: Path) -> None:
    made = model("phi")
    made.resize_token_embeddings(128)
    bad = saved("phi", tmp_path / "bad", made)
    shutil.copy(phi / "config.json", bad)
    ran = cli("verify", bad, "--like", phi)
    assert {code for code, _ in errors(ran)} == {"FS201"} and len(ran.errors) == 3
    # Resized in part.
    part = saved("phi", tmp_path / "part", made)
    old = load_file(phi / "model.safetensors")["lm_head.weight"]
    damaged(part, lambda t: t.update({"lm_head.weight": old}))
    ran = cli("verify", part, "--like", phi)
    assert (
        errors(ran) == [("FS201", "lm_head.weight")]
        and "only part of the vocabulary tensors was resized" in ran.errors[0]["help"]
    )
    # A config that says so, of tensors that are not resized.
    says = copy(phi, tmp_path / "says")
    shutil.copy(part / "config.json", says)
    assert cli("verify", says, "--like", phi).having("FS215", severity="warning")


@pytest.mark.parametrize("name", ["phi", "gpt2", "falcon"])
@pytest.mark.parametrize("layers", [2, 6])
def test_another_number_of_layers_that_the_config_states_is_a_note(
    name: str, layers: int, tmp_path: Path
) -> None:
    good = saved(name, tmp_path / "good")
    other = saved(name, tmp_path / "other", model(name, num_hidden_layers=layers))
    ran = cli("verify", other, "--like", good)
    assert ran.code == 0, ran.findings
    assert ran.having("FS212", got=f"{layers} layers, by the checkpoint's own")
    # Under the reference's config they are not explained.
    shutil.copy(good / "config.json", other)
    ran = cli("verify", other, "--like", good)
    assert {code for code, _ in errors(ran)} == {"FS103" if layers < 4 else "FS207"}


@pytest.mark.parametrize("layers", [2, 6])
def test_layers_that_are_not_exactly_those(layers: int, phi: Path, tmp_path: Path) -> None:
    other = saved("phi", tmp_path / "other", model("phi", num_hidden_layers=layers))
    lost = f"model.layers.{layers - 1}.mlp.fc1.bias"
    damaged(other, lambda t: t.pop(lost))
    ran = cli("verify", other, "--like", phi)
    assert ran.errors
    if layers == 2:
        assert errors(ran) == [("FS102", lost)]


# --- sources and targets


def check(out: Path, phi: Path, dtype: torch.dtype = torch.float32) -> None:
    """A result is the model, with the companions of the reference byte for byte."""
    want = load_file(phi / "model.safetensors")
    have = read_result(out)
    assert have.keys() == want.keys() and all(torch.equal(have[n], t.to(dtype)) for n, t in want.items())
    for name in ("tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (phi / name).read_bytes(), name
    if dtype == torch.float32:
        assert (out / "config.json").read_bytes() == (phi / "config.json").read_bytes()
    _, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]


def of_dcp(root: Path, state: dict[str, torch.Tensor]) -> Path:
    dcp.save(
        {"model": state, "optim": {"state": {"lm_head.bias": torch.zeros(3)}}},
        checkpoint_id=root,
        no_dist=True,
    )
    return root


def of_fsdp(root: Path, state: dict[str, torch.Tensor]) -> Path:
    root.mkdir()
    dtensor_maker.rank_files(root, state, 3)
    return root


def of_zero(stage: int) -> Callable[[Path, dict[str, torch.Tensor]], Path]:
    def write(root: Path, state: dict[str, torch.Tensor]) -> Path:
        root.mkdir()
        return zero_maker.write(root, zero_maker.Run(stage, 2, torch.float32, [state]))

    return write


def of_colossalai(root: Path, state: dict[str, torch.Tensor]) -> Path:
    """What save_model(shard=True) writes without pipeline stages."""
    root.mkdir()
    weight_map = {}
    for shard in (1, 2):
        held = dict(list(state.items())[shard - 1 :: 2])
        save_file(held, root / f"model-{shard:05d}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, f"model-{shard:05d}.safetensors")
    size = sum(t.nbytes for t in state.values()) / 1024 / 1024
    (root / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    return root


SOURCES: dict[str, Callable[[Path, dict[str, torch.Tensor]], Path]] = {
    "dcp": of_dcp,
    "fsdp": of_fsdp,
    "zero1": of_zero(1),
    "zero2": of_zero(2),
    "zero3": of_zero(3),
    "colossalai": of_colossalai,
}


@pytest.mark.parametrize("form", SOURCES)
def test_trainers_checkpoints_without_a_config_become_the_model(form: str, phi: Path, tmp_path: Path) -> None:
    want = load_file(phi / "model.safetensors")
    source = SOURCES[form](tmp_path / "ckpt", want)
    assert cli("convert", source, tmp_path / "out", "--to", "hf").code != 0, "nothing says what the model is"
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--like", phi)
    assert ran.code == 0 and proven(ran), ran.out
    check(tmp_path / "out", phi)
    # A tensor that was never saved is missed.
    want.pop("model.layers.1.mlp.fc1.bias")
    bad = SOURCES[form](tmp_path / "bad", want)
    command = ("convert", "--to", "hf")
    for options in (("--like", phi), ("--like", source)):
        config = ("--config", phi / "config.json") if options[1] == source else ()
        assert_refused(
            bad,
            tmp_path / "refused",
            "FS102",
            exit=3,
            command=command,
            options=(*options, *config),
            tensor="model.layers.1.mlp.fc1.bias",
        )


def test_a_checkpoints_own_config_goes_before_the_references(phi: Path, tmp_path: Path) -> None:
    made = model("phi")
    made.resize_token_embeddings(128)
    source = of_dcp(tmp_path / "ckpt", {n: t.clone() for n, t in made.state_dict().items()})
    made.config.save_pretrained(source)
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--like", phi)
    assert ran.code == 0 and ran.having("FS212", got="vocab_size 128"), ran.out
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 128
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_code_of_the_reference_goes_along(phi: Path, tmp_path: Path) -> None:
    config = json.loads((phi / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (phi / "config.json").write_text(json.dumps(config))
    (phi / "modeling_own.py").write_text("class Own: ...\n")
    source = of_dcp(tmp_path / "ckpt", load_file(phi / "model.safetensors"))
    assert cli("convert", source, tmp_path / "out", "--to", "hf", "--like", phi).code == 0
    assert (tmp_path / "out/modeling_own.py").read_text() == "class Own: ...\n"


def test_a_family_with_a_table_is_held_against_it_too(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    torch.manual_seed(7)
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path / "good")
    state = {n: t.clone() for n, t in made.state_dict().items()}
    source = of_dcp(tmp_path / "ckpt", state)
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--like", tmp_path / "good")
    assert ran.code == 0 and proven(ran), ran.out
    # What ranks divide is held against the whole.
    for to, more in (
        ("tp-safetensors", ("--tp", 2)),
        ("megatron", ("--tp", 2)),
        ("dcp", ()),
        ("gpt_neox", ("--tp", 2)),
    ):
        ran = cli("plan", tmp_path / "out", "--to", to, *more, "--like", tmp_path / "good")
        assert ran.code == 0 and proven(ran), (to, ran.out)
    # A config by itself is what the table is bound by.
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(tmp_path / "good/config.json", alone)
    for like in (alone, alone / "config.json"):
        ran = cli("convert", source, tmp_path / f"by_{like.name}", "--to", "hf", "--like", like)
        assert ran.code == 0 and (tmp_path / f"by_{like.name}/config.json").exists(), ran.out
    state.pop("model.layers.3.mlp.up_proj.weight")
    bad = of_dcp(tmp_path / "bad", state)
    for like in (alone, tmp_path / "good"):
        assert_refused(
            bad, tmp_path / "no", "FS102", exit=3, command=("convert", "--to", "hf"), options=("--like", like)
        )
    ran = cli("inspect", bad, "--like", alone, "--config", alone / "config.json")
    assert ran.errors[0]["code"] == "FS515"


def test_a_source_under_other_names_is_seen_as_transformers_has_it(tmp_path: Path) -> None:
    """GPT-NeoX against Hugging Face, merged and converted; its optimizer's state beside."""
    ran = cli("convert", NEOX, tmp_path / "good", "--to", "hf")
    assert ran.code == 0, ran.out
    for argv in (
        ("verify", NEOX),
        ("plan", NEOX, "--to", "hf"),
        ("plan", NEOX),
        ("plan", NEOX, "--to", "dcp"),
    ):
        ran = cli(*argv, "--like", tmp_path / "good")
        assert ran.code == 0 and proven(ran), (argv, ran.findings)
    name = "gpt_neox.layers.1.attention.dense.weight"
    (file,) = (tmp_path / "good").glob("*.safetensors")
    edit_safetensors(file, lambda t: t.update({name: t[name][:, :8]}))
    (tmp_path / "good/fastshard.manifest.json").unlink()
    ran = cli("verify", NEOX, "--like", file)
    assert ("FS208", name) in errors(ran), "the config beside it says that the reference is cut"


def test_padding_of_a_trainers_vocabulary_is_told_from_words(tmp_path: Path) -> None:
    assert cli("convert", NEOX, tmp_path / "good", "--to", "hf", "--vocab-size", 500).code == 0
    ran = cli("verify", NEOX, "--like", tmp_path / "good")
    assert {code for code, _ in errors(ran)} == {"FS201"} and "--vocab-size 500" in ran.errors[0]["run"][0], (
        ran.findings
    )
    ran = cli("verify", NEOX, "--like", tmp_path / "good", "--vocab-size", 500)
    assert ran.code == 0 and proven(ran), ran.findings


def test_scales_of_a_quantised_model_are_folded_in_before_it_is_judged(tmp_path: Path) -> None:
    """FP8 weights, taken by their values, are like the plain model; as they are stored they are not."""
    torch.manual_seed(7)
    made = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "good")
    tensors = load_file(tmp_path / "good/model.safetensors")
    quantised = copy(tmp_path / "good", tmp_path / "fp8")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (quantised / "config.json").write_text(json.dumps(config))
    for name in [n for n in tensors if "_proj." in n]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 16), -(-columns // 16))
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    for to in ("hf", "dcp"):
        ran = cli("plan", quantised, "--to", to, "--dtype", "bf16", "--like", tmp_path / "good")
        assert ran.code == 0 and proven(ran), ran.findings
    ran = cli("verify", quantised, "--like", tmp_path / "good")
    assert {code for code, _ in errors(ran)} == {"FS202", "FS207"}


def test_optimizer_state_is_no_part_of_the_model(phi: Path, tmp_path: Path) -> None:
    source = of_zero(1)(tmp_path / "ckpt", load_file(phi / "model.safetensors"))
    ran = cli("merge", source, tmp_path / "out", "--optimizer", "--like", phi)
    assert ran.code == 0 and proven(ran), ran.out
    assert any("exp_avg" in name for name in read_result(tmp_path / "out"))


def test_the_reference_may_be_any_checkpoint(phi: Path, tmp_path: Path) -> None:
    want = load_file(phi / "model.safetensors")
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.pop("lm_head.bias"))
    references = [make(tmp_path / form, want) for form, make in SOURCES.items()]
    torch.save(want, tmp_path / "whole.pt")
    references += [tmp_path / "whole.pt", phi / "model.safetensors"]
    for reference in references:
        assert errors(cli("inspect", bad, "--like", reference)) == [("FS102", "lm_head.bias")], reference
        if reference.parent != phi:
            assert not cli("inspect", phi, "--like", reference).errors, reference


# --- an index


def test_an_index_alone_tells_names_and_bytes(phi: Path, tmp_path: Path) -> None:
    shards = saved("phi", tmp_path / "shards", max_shard_size="30KB")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(shards / INDEX, alone)
    ran = cli("verify", phi, "--like", alone / INDEX)
    assert ran.code == 0 and "shapes and dtypes, the order" in ran.having("FS109")[0]["message"]
    assert (
        cli("verify", saved("phi", tmp_path / "half", model("phi").half()), "--like", alone / INDEX).code == 0
    )
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.pop("lm_head.bias"))
    assert errors(cli("verify", bad, "--like", alone / INDEX)) == [("FS102", "lm_head.bias")]
    name = "model.layers.0.mlp.fc1.weight"
    cut = damaged(copy(phi, tmp_path / "cut"), lambda t: t.update({name: t[name][:24]}))
    (told,) = cli("verify", cut, "--like", alone / INDEX).errors
    assert told["code"] == "FS201" and "total_size" in told["message"]
    # With the files beside it, their headers tell.
    assert errors(cli("verify", cut, "--like", shards / INDEX)) == [("FS208", name)]
    assert cli("verify", phi, "--like", shards / INDEX).code == 0


# --- references that are none


def test_a_broken_reference_is_refused_as_such(phi: Path, tmp_path: Path) -> None:
    good = copy(phi, tmp_path / "source")
    lost = saved("phi", tmp_path / "lost", max_shard_size="30KB")
    file = sorted(lost.glob("*.safetensors"))[0]
    held = file.read_bytes()
    file.unlink()
    for code, change in (
        ("FS101", lambda: None),
        ("FS312", lambda: file.write_bytes(held[:-10])),
        ("FS102", lambda: (file.write_bytes(held), edit_safetensors(file, lambda t: t.pop(sorted(t)[0])))),
    ):
        change()
        for command in ("inspect", "verify"):
            ran = cli(command, good, "--like", lost)
            assert ran.code != 0 and ran.errors[0]["code"] == code, ran.findings
            assert f"the reference {lost} (--like) cannot be used" in ran.errors[0]["message"]
    ran = cli("inspect", good, "--like", lost / INDEX)
    assert ran.errors[0]["code"] == "FS102" and "the reference" in ran.errors[0]["message"]


def test_a_reference_that_is_no_other_checkpoint(phi: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(phi)
    for like in (phi, tmp_path / "link", phi / "model.safetensors"):
        ran = cli("verify", phi, "--like", like)
        assert (
            ran.code == 2
            and ran.errors[0]["code"] == "FS515"
            and "the checkpoint itself" in ran.errors[0]["message"]
        )
    ran = cli("verify", phi, "--like", tmp_path / "nowhere")
    assert ran.code == 2 and ran.errors[0]["code"] == "FS501" and "--like" in ran.errors[0]["message"]
    empty = tmp_path / "empty"
    empty.mkdir()
    ran = cli("verify", phi, "--like", empty)
    assert ran.code == 2 and ran.errors[0]["code"] == "FS513" and "the reference" in ran.errors[0]["message"]
    shards = saved("phi", tmp_path / "shards", max_shard_size="30KB")
    ran = cli("verify", phi, "--like", sorted(shards.glob("*.safetensors"))[0])
    assert ran.errors[0]["code"] == "FS515" and "one of several files" in ran.errors[0]["message"]
    alone = tmp_path / "alone"
    alone.mkdir()
    config = json.loads((phi / "config.json").read_text())
    (alone / "config.json").write_text(json.dumps(config | {"model_type": "nobody_knows"}))
    ran = cli("verify", phi, "--like", alone)
    assert ran.errors[0]["code"] == "FS514" and "does not know this model" in ran.errors[0]["message"]
    (alone / "config.json").write_text("{}")
    assert cli("verify", phi, "--like", alone).errors[0]["code"] == "FS211"
    twice = tmp_path / "twice"
    state = load_file(phi / "model.safetensors")
    dcp.save(
        {**{f"net.{n}": t for n, t in state.items()}, **{f"ema.{n}": t for n, t in state.items()}},
        checkpoint_id=twice,
        no_dist=True,
    )
    ran = cli("verify", phi, "--like", twice)
    assert ran.code == 2 and ran.errors[0]["code"] == "FS106" and "'ema.'" in ran.errors[0]["got"], (
        ran.findings
    )


@pytest.mark.parametrize("command", [("convert", "--to", "hf"), ("merge",)])
def test_a_reference_is_not_written_over(command: tuple[str, ...], phi: Path, tmp_path: Path) -> None:
    source = of_dcp(tmp_path / "ckpt", load_file(phi / "model.safetensors"))
    for out in (phi, tmp_path / "above"):
        like = phi if out == phi else copy(phi, out / "inside")
        ran = cli(command[0], source, out, *command[1:], "--like", like, "--overwrite")
        assert ran.code == 2 and ran.errors[0]["code"] == "FS505", ran.out
        assert (like / "model.safetensors").exists()
    ran = cli("split", source, phi, "--parts", 2, "--like", phi)
    assert ran.code == 2 and ran.errors[0]["code"] == "FS505", ran.out


# --- everywhere


def test_like_goes_with_parts_and_expect(phi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = of_dcp(tmp_path / "ckpt", load_file(phi / "model.safetensors"))
    monkeypatch.chdir(tmp_path)
    run = split(source, tmp_path / "out", "hf", parts=2, like="good")
    # Whoever makes a part may be elsewhere.
    monkeypatch.chdir("/")
    for part in range(2):
        assert make_part(tmp_path / "out", part, run.id)
    commit(tmp_path / "out", run.id)
    check(tmp_path / "out", phi)
    manifest = tmp_path / "source.json"
    assert cli("manifest", source, "-o", manifest).code == 0
    ran = cli("convert", source, tmp_path / "again", "--to", "hf", "--like", phi, "--expect", manifest)
    assert ran.code == 0, ran.out
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.pop("lm_head.bias"))
    with pytest.raises(fastshard.FastshardError, match="FS102"):
        split(bad, tmp_path / "no", "hf", parts=2, like=phi)


def test_ranks_hold_their_source_against_it(phi: Path, tmp_path: Path) -> None:
    source = of_dcp(tmp_path / "ckpt", load_file(phi / "model.safetensors"))
    made = fastshard.convert(source, tmp_path / "out", "hf", like=phi, rank=0, world=1)
    assert len(made) == len(load_file(phi / "model.safetensors"))
    check(tmp_path / "out", phi)


def test_the_api_takes_it(phi: Path, tmp_path: Path) -> None:
    bad = damaged(copy(phi, tmp_path / "bad"), lambda t: t.pop("lm_head.bias"))
    opened = fastshard.open(bad, like=phi)
    assert [f.code for f in opened.findings if f.severity == "error"] == ["FS102"]
    assert [f.code for f in fastshard.verify(bad, like=phi) if f.severity == "error"] == ["FS102"]
    assert [f.code for f in fastshard.plan(bad, like=phi).findings if f.severity == "error"] == ["FS102"]
    for function in (
        fastshard.stats,
        lambda p, **k: fastshard.open(p, to="hf", **k),
        lambda p, **k: fastshard.merge(p, tmp_path / "o", **k),
        lambda p, **k: fastshard.convert(p, tmp_path / "o", "hf", **k),
    ):
        with pytest.raises(fastshard.FastshardError, match="FS102"):
            function(bad, like=phi)
    with pytest.raises(fastshard.FastshardError, match="is already open"):
        fastshard.verify(opened, like=phi)
    with pytest.raises(fastshard.FastshardError, match="FS515"):
        fastshard.open(bad, like=3)  # type: ignore[call-overload]
    source = of_dcp(tmp_path / "ckpt", load_file(phi / "model.safetensors"))
    view = fastshard.open(source, to="hf", like=phi)
    assert view.config == json.loads((phi / "config.json").read_text())
    assert not any("only partly checked" in line for line in view.not_checked)


def test_inspect_says_that_it_is_whole(phi: Path, tmp_path: Path) -> None:
    source = tmp_path / "whole.pt"
    torch.save(load_file(phi / "model.safetensors"), source)
    assert "not checked: " in cli("inspect", source, json_output=False).out
    text = cli("inspect", source, "--like", phi, json_output=False).out
    assert "not checked: " not in text and "OK, complete by headers" in text


# --- the core


def test_a_roster_of_the_core() -> None:
    roster = _core.Roster([("b", None, None, False), ("a", [None, 2], "F32", True)], [["a", "b"]])
    assert len(roster) == 2
    assert roster.entries() == [("a", [None, 2], "F32", True), ("b", None, None, False)]
    for entries, groups in (
        ([("a", None, None, False)] * 2, []),
        ([("a", None, "F7", False)], []),
        ([("a", None, None, False)], [["b"]]),
    ):
        with pytest.raises(_core.CoreError, match="FS515"):
            _core.Roster(entries, groups)
