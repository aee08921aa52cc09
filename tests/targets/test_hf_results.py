"""What lies beside the tensors of a Hugging Face result: transformers loads it as it is, or it is refused by
name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import zero_maker
from helpers import FIXTURES, HF, assert_refused, cli, copy, edit_safetensors, read_result
from safetensors.torch import load_file, save_file
from test_hf_models import SMALL, as_dcp, config_at, loaded, made, quantised

BOTH: list[list[str]] = [["merge"], ["convert", "--to", "hf"]]


def llama(**options: Any) -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options)).eval()


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def stated(folder: Path) -> str:
    config = config_of(folder)
    return str(config.get("dtype", config.get("torch_dtype")))


# --- quantised


@pytest.mark.parametrize("command", BOTH, ids=["merge", "hf"])
@pytest.mark.parametrize("method", ["awq", "hqq", "compressed-tensors"])
def test_packed_weights_are_not_cast(method: str, command: list[str], tmp_path: Path) -> None:
    """Their values are not those of the integers: a config without the quantisation would make noise of
    them."""
    quantised(method, tmp_path / "model")
    ran = assert_refused(
        tmp_path / "model",
        tmp_path / "out",
        "FS514",
        exit=2,
        command=tuple(command),
        options=("--dtype", "bf16"),
    )
    assert method in ran.errors[0]["message"]
    assert cli(command[0], tmp_path / "model", tmp_path / "kept", *command[1:]).code == 0
    assert "quantization_config" in config_of(tmp_path / "kept")


def fp8(folder: Path) -> Any:
    of = llama()
    of.save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "proj" in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(1, 1) + 0.5
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"quantization_config": quantisation}))
    return of


def test_a_model_in_fp8_of_a_family_with_a_table_is_kept(tmp_path: Path) -> None:
    fp8(tmp_path / "model")
    ran = cli("convert", tmp_path / "model", tmp_path / "out", "--to", "hf")
    assert ran.code == 0 and ran.having("FS109", message="quantization_config ('fp8') keeps scales"), (
        ran.findings
    )
    got, want = read_result(tmp_path / "out"), load_file(tmp_path / "model/model.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[n].float(), want[n].float()) for n in want)
    assert config_of(tmp_path / "out")["quantization_config"]["quant_method"] == "fp8"
    ran = cli("convert", tmp_path / "model", tmp_path / "values", "--to", "hf", "--dtype", "bf16")
    assert ran.code == 0 and "quantization_config" not in config_of(tmp_path / "values")
    assert not any("scale" in name for name in read_result(tmp_path / "values"))
    assert_refused(
        tmp_path / "model",
        tmp_path / "not",
        "FS514",
        exit=2,
        command=("convert", "--to", "megatron"),
        message="fp8",
    )


# --- sizes and ids


@pytest.mark.parametrize("command", BOTH, ids=["merge", "hf"])
def test_the_config_has_the_rows_that_are_written(command: list[str], tmp_path: Path) -> None:
    ran = cli(command[0], HF, tmp_path / "out", *command[1:], "--vocab-size", "900")
    assert ran.code == 0, ran.findings
    assert config_of(tmp_path / "out")["vocab_size"] == 900
    assert len(read_result(tmp_path / "out")["model.embed_tokens.weight"]) == 900
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_special_token_without_a_row_is_left_out(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    (words / "vocab.json").write_text(json.dumps({f"w{i}": i for i in range(513)}))
    named = {"pad_token": "w512", "eos_token": "w2", "bos_token": "w1"}
    (words / "tokenizer_config.json").write_text(json.dumps(named))
    source = FIXTURES / "gpt_neox/llama_gqa_pp_tp2"
    ran = cli("convert", source, tmp_path / "out", "--to", "hf", "--tokenizer", words)
    assert ran.code == 0 and ran.having("FS109", message="pad_token_id is left out", got="512"), ran.findings
    config = config_of(tmp_path / "out")
    assert config.get("pad_token_id") is None and config["eos_token_id"] == 2
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


# --- dtype


@pytest.mark.parametrize("command", BOTH, ids=["merge", "hf"])
def test_masters_beside_frozen_parameters_are_not_rounded(command: list[str], tmp_path: Path) -> None:
    of = llama(dtype="bfloat16")
    trained = {"lm_head.weight": of.lm_head.weight.detach().clone()}
    frozen = {n: t.detach().bfloat16() for n, t in of.named_parameters() if n not in trained}
    zero_maker.write(tmp_path / "run", zero_maker.Run(3, 2, torch.bfloat16, [trained], frozen=frozen))
    config_at(tmp_path / "run", of)
    assert cli(command[0], tmp_path / "run", tmp_path / "out", *command[1:]).code == 0
    assert stated(tmp_path / "out") == "float32"
    assert torch.equal(loaded(tmp_path / "out", of).lm_head.weight, trained["lm_head.weight"])


@pytest.mark.parametrize("command", BOTH, ids=["merge", "hf"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_config_of_a_training_does_not_round_its_checkpoint(
    name: str, command: list[str], tmp_path: Path
) -> None:
    """A config beside a checkpoint of FSDP or DeepSpeed is the base model's: training goes on in fp32."""
    of = llama() if name == "llama" else made(name)
    as_dcp(of, tmp_path / "run", under=None, optimizer=False)
    # A config of its own: that of the base model, not that of the run.
    of.config = type(of.config).from_dict(of.config.to_dict() | {"dtype": "bfloat16"})
    config_at(tmp_path / "run", of)
    assert cli(command[0], tmp_path / "run", tmp_path / "out", *command[1:]).code == 0
    assert stated(tmp_path / "out") == "float32"
    got = loaded(tmp_path / "out", of).state_dict()
    assert all(torch.equal(got[n], tensor) for n, tensor in of.state_dict().items())


def test_what_transformers_saved_keeps_its_config(tmp_path: Path) -> None:
    """A few tensors in fp32 do not make a model of bfloat16 another."""
    root = copy(HF, tmp_path / "model")
    first = sorted(root.glob("*.safetensors"))[0]
    edit_safetensors(
        first, lambda tensors: tensors.update({n: t.float() for n, t in tensors.items() if t.ndim == 1})
    )
    before = (root / "config.json").read_bytes()
    assert cli("merge", root, tmp_path / "out").code == 0
    assert (tmp_path / "out/config.json").read_bytes() == before


# --- names


@pytest.mark.parametrize("below", ["net", "actor", "policy", "ema", "unheard_of"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_below_a_trainers_key_is_taken_from_there(name: str, below: str, tmp_path: Path) -> None:
    """Any model where the files tell of the key; of flat names a known model, another one where the caller
    says where it lies, and it is not passed off before."""
    of = llama() if name == "llama" else made(name)
    state = dict(of.state_dict())
    dcp.save({below: state}, checkpoint_id=tmp_path / "run", no_dist=True)
    flat = {f"{below}.{n}": tensor.clone() for n, tensor in state.items()}
    (tmp_path / "flat").mkdir()
    dcp.save(flat, checkpoint_id=tmp_path / "flat", no_dist=True)
    for folder in ("run", "flat"):
        config_at(tmp_path / folder, of)
        command = ("convert", tmp_path / folder, tmp_path / f"{folder}-out", "--to", "hf")
        needed = name == "gpt2" and folder == "flat"
        if needed and below != "unheard_of":
            refused = cli(*command)
            assert refused.code == 2 and not (tmp_path / f"{folder}-out").exists()
            (error,) = refused.errors
            assert error["code"] == "FS514" and f"{below}." in error["message"]
            assert error["run"][0].endswith(f" --prefix {below}")
        ran = cli(*command, *(("--prefix", below) if needed else ()))
        assert ran.code == 0, ran.out
        have = read_result(tmp_path / f"{folder}-out")
        assert set(have) == set(state) and all(torch.equal(have[n], state[n]) for n in have)
    # The config that is written beside is for the model's own names.
    assert cli("merge", tmp_path / "run", tmp_path / "merged").code == 0
    assert set(read_result(tmp_path / "merged")) == set(state)
    (tmp_path / "run/config.json").unlink()
    assert cli("merge", tmp_path / "run", tmp_path / "plain").code == 0
    assert set(read_result(tmp_path / "plain")) == set(flat)


def test_state_beside_a_model_does_not_hide_where_it_begins(tmp_path: Path) -> None:
    of = made("gpt2")
    state = {"model": dict(of.state_dict()), "step": torch.tensor(7)}
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    config_at(tmp_path / "run", of)
    ran = cli("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert ran.code == 0 and ran.having("FS212", message="under 'model.'", tensor="step"), ran.findings
    got = loaded(tmp_path / "out", of).state_dict()
    assert all(torch.equal(got[n], tensor) for n, tensor in of.state_dict().items())


@pytest.mark.parametrize("below", ["module", "state_dict", "model"])
def test_a_bare_model_below_a_key_is_found(below: str, tmp_path: Path) -> None:
    of = transformers.LlamaModel(transformers.LlamaConfig(**SMALL)).eval()
    dcp.save({below: dict(of.state_dict())}, checkpoint_id=tmp_path / "run", no_dist=True)
    config_at(tmp_path / "run", of)
    ran = cli("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.findings
    got = loaded(tmp_path / "out", of).state_dict()
    assert all(torch.equal(got[n], tensor) for n, tensor in of.state_dict().items())


def test_another_config_of_transformers_is_no_models(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "transformers_version": "5.0.0"}')
    for command in BOTH:
        assert_refused(
            HF,
            tmp_path / "out",
            "FS211",
            exit=2,
            command=tuple(command),
            message="not a model config",
            options=("--config", tmp_path / "generation_config.json"),
        )


@pytest.mark.parametrize("to", ["dcp", "tp-safetensors"])
def test_the_config_goes_along_where_names_stay(to: str, tmp_path: Path) -> None:
    of = made("gpt2")
    of.save_pretrained(tmp_path / "model")
    assert cli("convert", tmp_path / "model", tmp_path / "there", "--to", to, "--dtype", "bf16").code == 0
    assert config_of(tmp_path / "there")["model_type"] == "gpt2" and stated(tmp_path / "there") == "bfloat16"
    ran = cli("convert", tmp_path / "there", tmp_path / "back", "--to", "hf")
    assert ran.code == 0, ran.findings
    got = loaded(tmp_path / "back", of).state_dict()
    assert all(torch.equal(got[n].bfloat16(), tensor.bfloat16()) for n, tensor in of.state_dict().items())
