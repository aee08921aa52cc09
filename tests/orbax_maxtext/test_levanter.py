"""Steps of Levanter: the Llama family to Hugging Face, what is damaged, and what stays refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_refused, cli, read_result
from levanter_maker import ABOUT, as_levanter, as_train_state, save
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

# Six heads of three groups, and sizes that differ: an exchange of axes shows.
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32,
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
}


def made(kind: str = "llama") -> Any:
    """A model with random values in all tensors, norms and biases among them."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(MODELS[kind], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.tie_weights()
    return model


def config_of(model: Any, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder / "config.json"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step of a Llama in the form of today, with its optimizer."""
    return save(tmp_path / "run/step-20", as_train_state(as_levanter(made())))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The same with a folder for each array, as until 2025."""
    return save(tmp_path / "plain/step-20", as_train_state(as_levanter(made())), ocdbt=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return config_of(made(), tmp_path / "config")


def assert_same_model(out: Path, model: Any) -> None:
    """Bit-equal tensors, and the same logits of transformers."""
    tensors = read_result(out)
    tied = model.config.tie_word_embeddings
    expected = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    loaded = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    ids = torch.arange(12)[None] * 7 % 50
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_the_llama_family_to_hugging_face(tmp_path: Path, kind: str, stacked: bool) -> None:
    model = made(kind)
    step = save(tmp_path / "step-20", as_train_state(as_levanter(model, stacked=stacked)), chunks=2)
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", config_of(model, tmp_path / "c"))
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", model)


@pytest.mark.parametrize("given", ["", "step-20", "step-20/model"])
def test_a_folder_for_each_array(plain: Path, config: Path, tmp_path: Path, given: str) -> None:
    """The run, the step, or the model's folder in it, which lacks the metadata."""
    ran = cli("convert", plain.parent / given, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", made())
    files = [path for path in (plain.parent / given).rglob("*") if path.is_file()]
    assert cli("inspect", plain.parent / given).doc["files"] == len(files)


def test_what_a_step_says(step: Path, config: Path, tmp_path: Path) -> None:
    ran = cli("inspect", step.parent, "--config", config)
    assert ran.code == 0 and ran.doc["framework"] == "Levanter" and ran.doc["step"] == "step-20"
    assert ran.doc["files"] == sum(path.is_file() for path in step.rglob("*"))
    assert cli("verify", step, "--config", config).code == 0
    assert cli("verify", step).code == 0
    merged = cli("merge", step, tmp_path / "merged")
    assert merged.code == 0, merged.errors
    assert set(read_result(tmp_path / "merged")) == set(as_train_state(as_levanter(made())))


def test_a_padded_vocabulary_is_cut(config: Path, tmp_path: Path) -> None:
    """Levanter rounds it up so that it divides over the devices; the rows have values."""
    arrays = as_levanter(made())
    for name in ("embeddings/token_embeddings/weight", "lm_head/weight"):
        arrays[name] = np.concatenate([arrays[name], np.ones((14, 24), np.float32)])
    step = save(tmp_path / "step-20", as_train_state(arrays))
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", made())


def test_a_temporary_step_is_read_with_a_note(config: Path, tmp_path: Path) -> None:
    step = save(tmp_path / "step-20", as_train_state(as_levanter(made())), is_temporary=True)
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert [f["severity"] for f in ran.findings if "is_temporary" in f["message"]] == ["note"]


def test_without_a_config_it_is_refused(step: Path, tmp_path: Path) -> None:
    """A Gemma of Levanter has the names and shapes of a Llama."""
    ran = assert_refused(step, tmp_path / "out", "FS209", exit=2, command=("convert", "--to", "hf"))
    assert len(ran.errors) == 1 and "--config" in json.dumps(ran.errors)


def test_a_lost_chunk(plain: Path, config: Path, tmp_path: Path) -> None:
    name = "model/transformer/layers/stacked/mlp/up_proj/weight"
    next(f for f in (plain / name).iterdir() if f.name[0].isdigit()).unlink()
    for command in (("convert", "--to", "hf"), ("merge",)):
        options = ("--config", config) if command[0] == "convert" else ()
        ran = assert_refused(plain, tmp_path / "out", "FS111", command=command, exit=3, options=options)
        assert {f["code"] for f in ran.errors} == {"FS111"} and ran.errors[0]["tensor"] == name


def test_a_lost_file_of_the_store(step: Path, tmp_path: Path) -> None:
    largest = max((step / "d").iterdir(), key=lambda file: file.stat().st_size)
    largest.unlink()
    ran = cli("verify", step)
    assert ran.code != 0 and ran.errors


@pytest.mark.parametrize(
    "name", ["transformer/layers/stacked/mlp/up_proj", "embeddings", "transformer/norm", "lm_head"]
)
def test_a_lost_array(plain: Path, config: Path, tmp_path: Path, name: str) -> None:
    shutil.rmtree(plain / "model" / name)
    options = ("--config", config)
    ran = assert_refused(
        plain, tmp_path / "out", "FS102", command=("convert", "--to", "hf"), exit=3, options=options
    )
    assert len(ran.errors) == 1 and ran.errors[0]["tensor"].startswith(f"model/{name}")


def test_a_wrong_shape(config: Path, tmp_path: Path) -> None:
    arrays = as_levanter(made())
    name = "transformer/layers/stacked/mlp/up_proj/weight"
    arrays[name] = arrays[name].transpose(0, 2, 1)
    step = save(tmp_path / "step-20", as_train_state(arrays))
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code != 0 and [f["tensor"] for f in ran.errors] == [f"model/{name}"]


def test_a_save_that_did_not_end(tmp_path: Path) -> None:
    """The metadata is written last; without it Levanter takes a folder for no checkpoint."""
    for ocdbt in (True, False):
        run = tmp_path / f"run{ocdbt}"
        for number in (20, 30):
            save(run / f"step-{number}", as_train_state(as_levanter(made())), ocdbt=ocdbt)
        (run / "step-30/metadata.json").unlink()
        ran = cli("inspect", run)
        assert ran.code != 0 and "step-30" in json.dumps(ran.errors)
        assert cli("verify", run, "--step", "step-20").code == 0
    ran = assert_refused(run / "step-30", tmp_path / "out", "FS104", exit=3)
    assert ran.errors[0]["expected"] == "metadata.json"


def test_the_metadata_of_another_step(step: Path) -> None:
    """The step may have been renamed, or its save did not end and the file was copied."""
    about = {"step": 30, "timestamp": "2026-01-01T00:00:00", "is_temporary": False}
    (step / "metadata.json").write_text(json.dumps(about))
    ran = cli("verify", step)
    assert ran.code == 0 and [f["severity"] for f in ran.findings if f["code"] == "FS107"] == ["warning"]
    assert cli("verify", step.rename(step.with_name("best"))).having("FS107") == []


def test_a_store_without_its_manifest(step: Path) -> None:
    (step / "manifest.ocdbt").unlink()
    for given in (step, step.parent):
        ran = cli("inspect", given)
        assert ran.code == 3 and [f["code"] for f in ran.errors] == ["FS101"]
        assert "manifest.ocdbt" in ran.errors[0]["message"]


def test_folders_of_arrays_beside_a_store(step: Path, config: Path, tmp_path: Path) -> None:
    """As where a later Levanter saved the step again: it reads the store alone."""
    arrays = as_train_state({name: values + 1 for name, values in as_levanter(made()).items()})
    shutil.copytree(save(tmp_path / "old", arrays, ocdbt=False), step, dirs_exist_ok=True)
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert [f["severity"] for f in ran.having("FS108")] == ["warning"]
    assert_same_model(tmp_path / "out", made())


def test_a_lost_moment(plain: Path, config: Path, tmp_path: Path) -> None:
    """No weight needs it; who merges or goes on with the run does."""
    name = "opt_state/inner_state/1/nu/lm_head/weight"
    shutil.rmtree(plain / name)
    ran = cli("convert", plain, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", made())
    for argv in (("verify", plain), ("merge", plain, tmp_path / "merged")):
        lost = cli(*argv).having("FS102")
        assert [(f["severity"], f["tensor"]) for f in lost] == [("warning", name)]


def test_the_models_folder_without_its_step(plain: Path, config: Path, tmp_path: Path) -> None:
    """Whether the save ended is unknown: the step's metadata says it."""
    alone = plain.rename(tmp_path / "step") / "model"
    alone = alone.rename(tmp_path / "alone")
    command = ("convert", "--to", "hf", "--config", config)
    ran = assert_refused(alone, tmp_path / "out", "FS104", command=command, exit=3)
    assert len(ran.errors) == 1 and "step's directory" in ran.errors[0]["help"]
    ran = cli("convert", alone, tmp_path / "out", *command[1:], "--accept", "uncommitted")
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", made())


_OF_PROCESS = """
import sys, numpy as np, tensorstore as ts
folder, arrays, process = sys.argv[1], np.load(sys.argv[2]), int(sys.argv[3])
for name in arrays.files:
    values = arrays[name]
    width = values.shape[-1] // 2 if values.ndim else 0
    is_divided = bool(width) and width * 2 == values.shape[-1]
    chunk = [*values.shape[:-1], width] if is_divided else list(values.shape)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": {"driver": "file", "path": folder}, "path": name},
        "metadata": {
            "shape": list(values.shape),
            "data_type": values.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": chunk},
            },
        },
    }
    store = ts.open(spec, create=True, open=True).result()
    if is_divided:
        own = slice(process * width, (process + 1) * width)
        store[..., own].write(values[..., own]).result()
    elif process == 0:
        store.write(values).result()
"""


def test_a_step_of_several_processes(config: Path, tmp_path: Path) -> None:
    """All write into one store at once, each the parts of its devices."""
    step, arrays = tmp_path / "step-20", as_train_state(as_levanter(made()))
    step.mkdir()
    np.savez(tmp_path / "arrays.npz", **arrays)
    run = [sys.executable, "-c", _OF_PROCESS, f"{step}/", tmp_path / "arrays.npz"]
    processes = [subprocess.Popen([*run, str(process)]) for process in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    (step / "metadata.json").write_text(json.dumps(ABOUT))
    assert sorted(path.name for path in step.iterdir()) == ["d", "manifest.ocdbt", "metadata.json"]
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", made())


def test_the_optimizer_alone(plain: Path, tmp_path: Path) -> None:
    ran = assert_refused(plain / "opt_state", tmp_path / "out", "FS514", exit=2)
    assert "opt_state" in ran.errors[0]["message"] and str(plain) in ran.errors[0]["help"]
    shutil.rmtree(plain / "model")
    ran = assert_refused(plain, tmp_path / "out", "FS101", exit=3)
    assert len(ran.errors) == 1 and "model is missing" in ran.errors[0]["message"]


@pytest.mark.parametrize(
    ("other", "code"),
    [(MODELS["qwen3"], "FS102"), (GPT2Config(), "FS514"), (GemmaConfig(**SIZES), "FS514")],
)
def test_a_config_of_another_model(step: Path, tmp_path: Path, other: PreTrainedConfig, code: str) -> None:
    other.save_pretrained(tmp_path / "c")
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", tmp_path / "c/config.json")
    assert ran.code != 0 and ran.having(code, severity="error")
    assert not (tmp_path / "out").exists()


def test_parts_that_the_model_of_the_config_lacks(config: Path, tmp_path: Path) -> None:
    step = save(tmp_path / "step-20", as_train_state(as_levanter(made("qwen2"))))
    options = ("--config", config)
    ran = assert_refused(
        step, tmp_path / "out", "FS215", command=("convert", "--to", "hf"), exit=1, options=options
    )
    assert len(ran.errors) == 1 and ran.errors[0]["tensor"].endswith("q_proj/bias")


@pytest.mark.parametrize("ocdbt", [True, False])
def test_other_models_are_refused_by_name(tmp_path: Path, ocdbt: bool) -> None:
    """Levanter's GPT-2: a merge keeps its names, a conversion says whose tool exports it."""
    rng = np.random.default_rng(1)
    names = ("transformer/blocks/stacked/attn/c_attn/weight", "embeddings/token_embeddings/weight")
    arrays = {name: rng.standard_normal((4, 6)).astype(np.float32) for name in names}
    step = save(tmp_path / "step-20", as_train_state(arrays), ocdbt=ocdbt)
    assert cli("merge", step, tmp_path / "merged").code == 0
    ran = assert_refused(step, tmp_path / "out", "FS514", command=("convert", "--to", "hf"), exit=2)
    assert len(ran.errors) == 1
    assert "Levanter" in ran.errors[0]["message"] and "Levanter's own tool" in ran.errors[0]["help"]


def test_moments_of_zeros_that_the_store_leaves_out(tmp_path: Path) -> None:
    """The first moments of a run are zeros, and the store leaves them out."""
    model = made("qwen2")
    arrays = as_train_state(as_levanter(model))
    for name, values in arrays.items():
        if name.startswith("opt_state/"):
            arrays[name] = np.zeros_like(values)
    step = save(tmp_path / "step-20", arrays, chunks=2)
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", config_of(model, tmp_path / "c"))
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", model)


@pytest.mark.parametrize("slots", [("mu",), ("mu", "nu")])
def test_a_part_of_a_moment_that_the_store_leaves_out(tmp_path: Path, slots: tuple[str, ...]) -> None:
    """No gradient came to some rows yet: a merge takes zeros for what is absent, and the model is whole."""
    model = made()
    arrays = as_train_state(as_levanter(model))
    for name, values in arrays.items():
        if any(f"/{slot}/" in name for slot in slots):
            values[..., values.shape[-1] // 2 :] = 0
    step = save(tmp_path / "step-20", arrays, chunks=2)
    config = config_of(model, tmp_path / "c")
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", model)
    assert cli("verify", step).code == 0
    ran = cli("merge", step, tmp_path / "merged")
    assert ran.code == 0 and [f["severity"] for f in ran.findings if f["code"] == "FS111"] == ["note"]
    merged = read_result(tmp_path / "merged")
    assert all(np.array_equal(merged[name].numpy(), values) for name, values in arrays.items())


@pytest.mark.parametrize("lost", ["d", "moment"])
def test_a_part_of_a_moment_that_is_lost_is_no_zeros(config: Path, tmp_path: Path, lost: str) -> None:
    """The index of a store names what was written; among folders of arrays every chunk is a file."""
    step = save(tmp_path / "step-20", as_train_state(as_levanter(made())), ocdbt=lost == "d", chunks=2)
    files = step / ("d" if lost == "d" else "opt_state/inner_state/1/mu/lm_head/weight")
    max((f for f in files.iterdir() if f.name != ".zarray"), key=lambda f: f.stat().st_size).unlink()
    for command in (("merge",), ("verify",)):
        ran = cli(command[0], step, *([tmp_path / "out"] if command[0] == "merge" else []))
        assert ran.code == 3 and ran.errors, ran.out
    assert not (tmp_path / "out").exists()


def test_a_weight_of_zeros_is_zeros_by_the_users_word_alone(tmp_path: Path) -> None:
    """A store with an older manifest lacks whole arrays, and no data file shows it."""
    model = made("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias.zero_()
    step = save(tmp_path / "step-20", as_train_state(as_levanter(model)), chunks=2)
    command = ("convert", "--to", "hf", "--config", config_of(model, tmp_path / "c"))
    assert_refused(step, tmp_path / "out", "FS111", command=command, exit=3)
    ran = cli(command[0], step, tmp_path / "out", *command[1:], "--accept", "elided-zeros")
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", model)


def test_a_part_of_an_array_is_not_taken_for_zeros(config: Path, tmp_path: Path) -> None:
    """Where each host wrote to a disk of its own, the store of the first has a part of each array."""
    arrays = as_levanter(made())
    for name, values in arrays.items():
        if values.shape[-1] % 2 == 0:
            values[..., values.shape[-1] // 2 :] = 0
            arrays[name] = values
    step = save(tmp_path / "step-20", as_train_state(arrays), chunks=2)
    assert_refused(
        step,
        tmp_path / "out",
        "FS111",
        command=("convert", "--to", "hf"),
        exit=3,
        options=("--config", config),
    )


def test_weights_with_inputs_first_are_refused(config: Path, tmp_path: Path) -> None:
    """As haliax once laid out linear layers by default."""
    arrays = as_levanter(made())
    for name, values in arrays.items():
        if name.endswith(("up_proj/weight", "gate_proj/weight", "down_proj/weight")):
            arrays[name] = values.transpose(0, 2, 1)
    step = save(tmp_path / "step-20", as_train_state(arrays))
    ran = cli("convert", step, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code != 0 and {f["code"] for f in ran.errors} == {"FS201"}
