"""Every reader of a config, with values that nobody expects there: each ends with a documented exit code, and
never with FS520.

``FASTSHARD_FUZZ_EXAMPLES=100000 pytest tests/hostile/test_config_fuzz.py`` goes on for hours, with other
examples each time. What it finds becomes an ``@example``, and stays.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import yaml
from fastshard import _core
from fastshard.common import config_text, toml_text
from helpers import cli, copy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from quantised_maker import model, write
from safetensors.torch import save_file

FIXTURES = Path(__file__).parents[1] / "fixtures"
#: Examples of each reader; more of them are chosen anew in each run.
_MANY = int(os.environ.get("FASTSHARD_FUZZ_EXAMPLES", "0"))
#: Values as their text: of other types, of other sizes, and of no size at all.
VALUES = [
    "null",
    "true",
    "0",
    "-1",
    "1.5",
    "7",
    '""',
    '"x"',
    '"7"',
    "[]",
    "{}",
    "[null]",
    "[7]",
    '[[1, "x"]]',
    '{"a": 7}',
    '{"": null}',
    '"("',
    '"re:("',
    '"\\ud800"',
    '"\\u0000"',
    "1e999",
    "-1e999",
    "NaN",
    "1" + "0" * 30,
    "1" + "0" * 299,
    "1" + "0" * 400,
    "-1" + "0" * 400,
    "18446744073709551616",
    "9223372036854775808",
    "4294967296",
    "[" * 99 + "]" * 99,
    "[" * 110 + "]" * 110,
    "[" * 100_000,
    '{"a":' * 3000,
    '"' + "a" * 70_000 + '"',
    '"(a|a)*b"',
    '{"(a+)+$": 8}',
    '{"(a|a)*b": 1' + "0" * 400 + "}",
    "[1.5, 1" + "0" * 299 + ", 1" + "0" * 299 + "]",
]


def _model(folder: Path) -> Path:
    tiny_models.model("llama", folder / "in")
    return folder / "in/config.json"


def _quantised(form: str, folder: Path) -> Path:
    config, tensors = model(form)
    return write(folder / "in", config, tensors) / "config.json"


def _adapter(folder: Path) -> Path:
    from peft import LoraConfig, get_peft_model

    base = tiny_models.model("llama", folder / "base")
    options = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"v_proj": 2},
        alpha_pattern={"v_proj": 3},
    )
    get_peft_model(base, options).save_pretrained(folder / "in")
    return folder / "in/adapter_config.json"


def _index(folder: Path) -> Path:
    tiny_models.model("llama", folder / "one")
    (folder / "in").mkdir()
    shutil.copy(folder / "one/config.json", folder / "in")
    from safetensors.torch import load_file

    tensors = load_file(folder / "one/model.safetensors")
    names = sorted(tensors)
    shards = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, some in shards.items():
        save_file({name: tensors[name] for name in some}, folder / "in" / file)
    weight_map = {name: file for file, some in shards.items() for name in some}
    index = folder / "in/model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 5}, "weight_map": weight_map}))
    return index


def _beside(name: str, content: dict[str, Any], folder: Path) -> Path:
    _model(folder)
    (folder / "in" / name).write_text(json.dumps(content))
    return folder / "in" / name


def _fixture(name: str, file: str, folder: Path) -> Path:
    copy(FIXTURES / name, folder / "in")
    path = folder / "in" / file
    if path.suffix == ".yml":
        path.write_text(json.dumps(yaml.safe_load(path.read_text())))
    return path


def _manifest(folder: Path) -> Path:
    _model(folder)
    assert cli("merge", folder / "in", folder / "out").code == 0
    return folder / "out/fastshard.manifest.json"


def _settings(folder: Path) -> Path:
    _model(folder)
    (folder / "settings.json").write_text(json.dumps({"ignore": ["FS108"], "fail_on": "error"}))
    return folder / "settings.json"


_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 1, "content": "<s>"}],
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
}
_INSPECT, _VERIFY, _MERGE = ["inspect", "in"], ["verify", "in"], ["merge", "in", "OUT"]
#: How a checkpoint with a config is made, and what reads it.
READERS: dict[str, tuple[Callable[[Path], Path], list[list[str]]]] = {
    "config.json": (
        _model,
        [
            _INSPECT,
            _VERIFY,
            ["convert", "in", "OUT", "--to", "gpt_neox"],
            ["convert", "in", "OUT", "--to", "dcp"],
        ],
    ),
    "compressed-tensors": (
        functools.partial(_quantised, "ct 4 bit"),
        [_VERIFY, _MERGE, ["convert", "in", "OUT", "--to", "hf", "--dtype", "bf16"]],
    ),
    "gptq": (
        functools.partial(_quantised, "gptq 4 bit"),
        [_VERIFY, _INSPECT, ["convert", "in", "OUT", "--to", "hf", "--dtype", "bf16"]],
    ),
    "fp8": (
        functools.partial(_quantised, "fp8 blocks"),
        [_VERIFY, _INSPECT, ["convert", "in", "OUT", "--to", "hf", "--dtype", "bf16"]],
    ),
    "adapter_config.json": (_adapter, [_INSPECT, _VERIFY, ["merge", "base", "OUT", "--adapter", "in"]]),
    "index": (_index, [_INSPECT, _VERIFY, _MERGE]),
    "tokenizer.json": (functools.partial(_beside, "tokenizer.json", _TOKENIZER), [_VERIFY, _MERGE]),
    "tokenizer_config.json": (
        functools.partial(
            _beside,
            "tokenizer_config.json",
            {"model_max_length": 7, "added_tokens_decoder": {"1": {"content": "x"}}},
        ),
        [_VERIFY, _MERGE],
    ),
    "modules.json": (
        functools.partial(_beside, "modules.json", {"a": [{"path": "1_Pooling", "type": "x"}]}),
        [_MERGE],
    ),
    "config.yml": (
        functools.partial(_fixture, "gpt_neox/neox_pp_tp1", "global_step4/configs/config.yml"),
        [_INSPECT, ["convert", "in", "OUT", "--to", "hf"]],
    ),
    "_METADATA": (
        functools.partial(_fixture, "orbax/gpt3_micro_scan_bf16_zarr2", "ckpt/_METADATA"),
        [_INSPECT, _VERIFY],
    ),
    "manifest": (
        _manifest,
        [["verify", "in", "--expect", "out/fastshard.manifest.json"], ["verify", "out"], ["inspect", "out"]],
    ),
}


def _places(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Keys that lead to each value of a document."""
    items = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    return [at, *(place for key, item in list(items)[:40] for place in _places(item, (*at, key)))]


def _written(content: Any, place: tuple[Any, ...], value: str) -> str:
    """The text of a document with another value in one place."""
    mark = "\u0001"
    if not place:
        return value
    changed = json.loads(json.dumps(content))
    inner = functools.reduce(lambda one, key: one[key], place[:-1], changed)
    inner[place[-1]] = mark
    return json.dumps(changed).replace(json.dumps(mark), value)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, Any]]:
    """The folder of a reader's checkpoint, its config, and what the config says."""

    @functools.cache
    def make(reader: str) -> tuple[Path, Path, Any]:
        folder = tmp_path_factory.mktemp(reader.replace(".", "_"))
        path = READERS[reader][0](folder)
        return folder, path, json.loads(path.read_text())

    return make


def ends_well(folder: Path, words: list[str]) -> None:
    shutil.rmtree(folder / "OUT", ignore_errors=True)
    ran = cli(*(folder / word if (folder / word).exists() or word == "OUT" else word for word in words))
    assert ran.code in (0, 1, 2, 3) and not ran.having("FS520") and "Traceback" not in ran.err, (
        ran.out + ran.err
    )
    if ran.code:
        assert ran.errors or "--json" not in ran.out, ran.out
        assert not (folder / "OUT").exists(), ran.out


@pytest.mark.parametrize("reader", READERS)
@settings(
    max_examples=_MANY or 12,
    derandomize=not _MANY,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(choice=st.data())
def test_a_reader_takes_any_value(
    reader: str, choice: st.DataObject, made: Callable[[str], tuple[Path, Path, Any]]
) -> None:
    folder, path, content = made(reader)
    before = path.read_bytes()
    place = choice.draw(st.sampled_from(_places(content)), label="place")
    value = choice.draw(st.sampled_from(VALUES), label="value")
    try:
        path.write_text(_written(content, place, value))
        ends_well(folder, choice.draw(st.sampled_from(READERS[reader][1]), label="command"))
    finally:
        path.write_bytes(before)


#: What was found: a reader, the place of a value, the value, and the code and a word of what is found now.
FOUND: list[tuple[str, tuple[Any, ...], str, str, str]] = [
    ("adapter_config.json", ("r",), "1" + "0" * 400, "FS211", "r: a number of 401 digits"),
    ("adapter_config.json", ("r",), "1e30", "FS211", "r"),
    ("adapter_config.json", ("r",), "1e999", "FS211", "r"),
    ("adapter_config.json", ("lora_alpha",), "1" + "0" * 400, "FS211", "lora_alpha: a number of 401 digits"),
    ("adapter_config.json", ("lora_alpha",), "NaN", "FS211", "lora_alpha"),
    (
        "adapter_config.json",
        ("rank_pattern",),
        '{"x": 1' + "0" * 400 + "}",
        "FS211",
        "rank_pattern.x: a number",
    ),
    ("adapter_config.json", ("rank_pattern",), '{"x": 0.5}', "FS211", "x"),
    ("adapter_config.json", ("rank_pattern",), "[7]", "FS211", "rank_pattern"),
    ("adapter_config.json", ("target_parameters",), "7", "FS211", "target_parameters"),
    ("adapter_config.json", ("target_modules",), "7", "FS211", "target_modules"),
    ("adapter_config.json", ("modules_to_save",), "[7]", "FS211", "modules_to_save"),
    ("adapter_config.json", ("use_rslora",), '"false"', "FS211", "use_rslora"),
    ("adapter_config.json", ("alpha_pattern",), '{"(": 8}', "FS211", "no regular expression"),
    ("adapter_config.json", (), "[" * 3000, "FS211", "deep"),
    ("config.json", (), '{"a":' * 110 + "1" + "}" * 110, "FS211", "levels"),
    ("config.json", ("hidden_size",), "1" + "0" * 400, "FS211", "hidden_size: a number of 401 digits"),
    ("index", ("weight_map",), "[" * 3000, "FS211", "deep"),
    ("manifest", ("tensors", 0, "file"), "[null]", "FS518", "tensors"),
]


@pytest.mark.parametrize(("reader", "place", "value", "code", "words"), FOUND)
def test_what_was_found_is_refused_with_its_key(
    reader: str,
    place: tuple[Any, ...],
    value: str,
    code: str,
    words: str,
    made: Callable[[str], tuple[Path, Path, Any]],
) -> None:
    folder, path, content = made(reader)
    before = path.read_bytes()
    try:
        path.write_text(_written(content, place, value))
        for command in READERS[reader][1]:
            ends_well(folder, command)
        shutil.rmtree(folder / "OUT", ignore_errors=True)
        ran = cli(
            *(
                folder / word if (folder / word).exists() or word == "OUT" else word
                for word in READERS[reader][1][-1]
            )
        )
    finally:
        path.write_bytes(before)
    assert ran.code == 2 and [one["code"] for one in ran.errors] == [code], ran.out
    assert words in ran.errors[0]["message"] and ran.errors[0]["file"].endswith(path.name), ran.out


#: What people have: no limit of a tokenizer, and an infinite one of Mamba.
GOOD: list[tuple[str, tuple[Any, ...], str]] = [
    ("tokenizer_config.json", ("model_max_length",), "1000000000000000019884624838656"),
    ("config.json", ("vocab_size_per_layer_input",), "Infinity"),
    ("config.json", ("model_max_length",), "1000000000000000019884624838656"),
    ("config.json", ("rms_norm_eps",), "1e-6"),
    ("adapter_config.json", ("lora_alpha",), "3.0"),
    ("adapter_config.json", ("rank_pattern",), '{"^v_proj$": 2, ".*v_proj": 2}'),
    ("adapter_config.json", ("use_rslora",), "null"),
    ("adapter_config.json", ("layers_to_transform",), "[0, 1]"),
    ("adapter_config.json", ("alpha_pattern",), '{"' + "(a|a)" * 40 + 'b": 8}'),
]


@pytest.mark.parametrize(("reader", "place", "value"), GOOD)
def test_good_values_are_taken(
    reader: str, place: tuple[Any, ...], value: str, made: Callable[[str], tuple[Path, Path, Any]]
) -> None:
    folder, path, content = made(reader)
    before = path.read_bytes()
    try:
        path.write_text(_written({**content, place[0]: None}, place, value))
        shutil.rmtree(folder / "OUT", ignore_errors=True)
        ran = cli(
            *(
                folder / word if (folder / word).exists() or word == "OUT" else word
                for word in READERS[reader][1][-1]
            )
        )
    finally:
        path.write_bytes(before)
    assert ran.code == 0, ran.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 100_000, "levels"),
        ("a." * 200_000 + "b = 1", "parts"),
        ("[" + "a." * 200_000 + "b]", "parts"),
        ("a = " + "{b = " * 100_000, "levels"),
        ("a = 1" + "0" * 5000, "digits"),
    ],
)
def test_settings_that_are_too_deep_are_refused(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model(tmp_path)
    monkeypatch.chdir(tmp_path)
    for file, head in (("fastshard.toml", ""), ("pyproject.toml", "[tool.fastshard]\n")):
        (tmp_path / file).write_text(head + text)
        ran = cli("verify", "in")
        (found,) = ran.errors
        assert (ran.code, found["code"]) == (2, "FS515") and words in found["message"], ran.out
        assert found["file"].endswith(file)
        (tmp_path / file).unlink()


@pytest.mark.parametrize(
    "text",
    [
        'ignore = ["FS108"] # a.b.c [[[\n',
        "ignore = ['FS108']",
        'ignore = [\n  "FS108", # one\n  "FS109",\n]\n',
        "",
        'ignore = ["""FS108"""]',
    ],
)
def test_settings_that_people_write_are_taken(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fastshard.toml").write_text(text)
    assert cli("verify", "in").code == 0


@settings(max_examples=_MANY or 40, derandomize=not _MANY, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "a",
                "b",
                ".",
                "=",
                "[",
                "]",
                "{",
                "}",
                ",",
                ":",
                "\n",
                '"',
                "'",
                '"""',
                "\\",
                "#",
                "1",
                "-",
                "?",
                "&a",
                "*a",
                "<<",
                "!!",
                "!!int ",
                "  ",
                "ignore",
                "1e999",
                "1" + "0" * 400,
            ]
        ),
        max_size=10,
    ).map("".join),
    st.sampled_from([1, 3, 20_000]),
)
@example("[", 100_000)
@example("a.", 200_000)
@example("ignore = [", 100_000)
@example("a = {b = ", 30_000)
@example('"\\', 100_000)
@example("- ", 100_000)
@example("? ", 100_000)
def test_texts_of_any_signs_end(text: str, times: int) -> None:
    """TOML and YAML; JSON has a tenth of their signs."""
    for load in (toml_text.load, config_text.parse_yaml, config_text.parse_json, core_table):
        try:
            load((text * times)[: 1 << 17])
        except ValueError as error:
            assert len(str(error)) < 2000, error


def core_table(text: str) -> None:
    """Reads a layout."""
    with contextlib.suppress(_core.CoreError):
        _core.Table(text)
