"""What keeps codes from having values, in a config or in a record beside them, is an error of verify; nothing
is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from helpers import cli
from quantised_maker import FORMS, LAYERS, LINEAR, Tensors, ct, model, write
from test_quantised import torchao
from test_quantised_lost import mlx, mxfp4

AT = "model.layers.1.mlp.up_proj"
STATE = f"{AT}.weight.quant_state.bitsandbytes__nf4"
#: What judges the model, and what makes its values.
COMMANDS = (["verify"], ["merge", "out", "--dtype", "bf16"])
#: What no integer of a config is, where it must be above zero.
NO_SIZES: tuple[Any, ...] = (
    0,
    -7,
    1 << 62,
    10**30,
    64.0,
    0.5,
    "64",
    "many",
    True,
    [64],
    {},
    float("nan"),
    float("inf"),
)
#: What no bits of a code are.
NO_BITS = (0, -4, 33, 10**30, 4.0, "4", True, [4])
#: What no block of a matrix is.
NO_BLOCKS: tuple[Any, ...] = (
    [0, 128],
    [128, -1],
    [128],
    [128, 128, 128],
    [128.0, 128],
    [True, 128],
    [10**30, 128],
    ["128", 128],
    "x",
    "128x",
    128,
    {},
    [],
)
#: A word where there is none.
NO_FLAGS = ("true", "no", 1, 0, [])


def assert_refused(folder: Path, out: Path, words: str, tensor: str | None) -> None:
    """That each command names the same one finding, ends with 1 and leaves nothing."""
    for verb, *rest in COMMANDS:
        ran = cli(verb, folder, *(out if one == "out" else one for one in rest))
        assert ran.code == 1 and not out.exists(), (verb, rest, ran.out)
        found = [f for f in ran.findings if f["severity"] == "error"]
        assert len(found) == 1, (verb, rest, found)
        assert words in found[0]["message"] and found[0].get("tensor") == tensor, found
        assert found[0]["expected"] and found[0]["got"] and found[0]["help"]


def state(**change: Any) -> dict[str, Any]:
    """The record of a weight of 320 times 256 elements; None takes a key away."""
    record = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [320, 256],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.1,
    } | change
    return {key: value for key, value in record.items() if value is not ...}


def with_record(record: object, form: str = "bnb nf4 nested") -> tuple[dict[str, Any], Tensors]:
    config, tensors = model(form)
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    return config, tensors | {STATE: torch.tensor(list(text), dtype=torch.uint8)}


#: Records by what is wrong with them: the key, and its value; `...` takes it away.
RECORDS: list[tuple[str, Any]] = [
    *(
        ("nested_offset", value)
        for value in (float("nan"), float("inf"), -0.5, 1e39, "word", "0.1", True, None, [], ...)
    ),
    *(("nested_blocksize", value) for value in (0, -256, 256.0, 1 << 62, "256", True, None, ...)),
    *(("nested_dtype", value) for value in ("float33", "int8", 32, None, ...)),
    *(("blocksize", value) for value in (0, -64, 64.0, 1 << 62, "64", True, None, ...)),
    *(("dtype", value) for value in ("bogus", "int8", "BFLOAT16", 16, None, ...)),
    *(("quant_type", value) for value in ("zz", "fp4", "NF4", 4, None, ...)),
    *(
        ("shape", value)
        for value in (
            [-320, -256],
            [320.0, 256.0],
            [1.5, 10**400],
            [True, 81920],
            ["320", 256],
            "320x256",
            81920,
            None,
            ...,
        )
    ),
]


@pytest.mark.parametrize(("key", "value"), RECORDS, ids=str)
def test_a_record_that_gives_no_values_is_refused_everywhere(key: str, value: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", *with_record(state(**{key: value})))
    assert_refused(folder, tmp_path / "out", key, STATE)


def test_what_a_record_does_not_say_is_not_shown(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", *with_record(state(shape=[-320, -256])))
    shown = {row.name for row in fastshard.ls(folder) if row.weight is not None}
    assert len(shown) == LAYERS * len(LINEAR) - 1 and f"{AT}.weight" not in shown


@pytest.mark.parametrize(
    "record",
    [b"", b"{}", b"[1]", b"\0" * 80, b"{", b'"word"', b"\xff\xfe", b"[" * 5000, b" " * 70000],
    ids=len,
)
def test_other_bytes_in_the_place_of_a_record_are_refused(record: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", *with_record(record or b"\0"))
    assert_refused(folder, tmp_path / "out", "quant state", STATE)


def test_records_that_give_values_are_taken(tmp_path: Path) -> None:
    """Each as bitsandbytes writes it, or as its numbers can be."""
    good = (
        ("bnb nf4 nested", state(nested_offset=0)),
        ("bnb nf4 nested", state(nested_offset=0.0)),
        ("bnb nf4 nested", state(dtype="float16")),
        ("bnb nf4 nested", state(dtype="float32")),
        ("bnb nf4 nested", state(shape=[2, 160, 256])),
        # Where maxima are stored as they are nothing is read of nested ones.
        ("bnb nf4", state()),
        ("bnb nf4", state(nested_offset=..., nested_dtype=..., nested_blocksize=...)),
        ("bnb nf4", state(nested_offset="word")),
    )
    for number, (form, record) in enumerate(good):
        folder = write(tmp_path / str(number), *with_record(record, form))
        assert cli("verify", folder).code == 0, record
        assert cli("merge", folder, tmp_path / f"out{number}", "--dtype", "bf16").code == 0, record
    # Codes have values elsewhere, and this product is not rounded here.
    folder = write(tmp_path / "half", *with_record(state(nested_dtype="float16")))
    assert cli("verify", folder).code == 0
    ran = cli("merge", folder, tmp_path / "out", "--dtype", "bf16")
    assert ran.code == 2 and ran.having("FS514", message="float32"), ran.out


def test_fp4_and_its_record(tmp_path: Path) -> None:
    config, tensors = model("bnb nf4")
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("__nf4"):
            text = bytes(tensor.tolist()).replace(b'"nf4"', b'"fp4"')
            tensor = torch.tensor(list(text), dtype=torch.uint8)
        renamed[name.replace("__nf4", "__fp4")] = tensor
    assert cli("verify", write(tmp_path / "in", config, renamed)).code == 0
    assert cli("merge", tmp_path / "in", tmp_path / "out", "--dtype", "bf16").code == 0


@pytest.mark.parametrize("role", ["nested_quant_map", "quant_map"])
@pytest.mark.parametrize("number", [0.0, 0.5])
def test_a_table_of_one_number_is_refused(role: str, number: float, tmp_path: Path) -> None:
    config, tensors = model("bnb nf4 nested")
    name = f"{AT}.weight.{role}"
    folder = write(tmp_path / "in", config, tensors | {name: torch.full_like(tensors[name], number)})
    assert_refused(folder, tmp_path / "out", "holds only one number", name)


@pytest.mark.parametrize(("layout", "code"), [(0, 0), (3, 0), (4, 1), (255, 1)])
def test_the_layout_of_int8_is_one_of_bitsandbytes(layout: int, code: int, tmp_path: Path) -> None:
    config, tensors = model("bnb int8")
    name = f"{AT}.weight_format"
    tensors[name] = torch.tensor(layout, dtype=torch.uint8)
    ran = cli("verify", write(tmp_path / "in", config, tensors))
    found = [(f["code"], f["tensor"]) for f in ran.findings if f["severity"] == "error"]
    assert (ran.code, found) == (code, [("FS215", name)] * code), ran.out


def test_nested_maxima_beside_plain_ones_are_refused(tmp_path: Path) -> None:
    config, tensors = model("bnb nf4")
    name = f"{AT}.weight"
    more = {f"{name}.nested_absmax": torch.ones(5), f"{name}.nested_quant_map": torch.rand(256)}
    assert_refused(
        write(tmp_path / "in", config, tensors | more),
        tmp_path / "out",
        "are not quantised",
        f"{name}.absmax",
    )


def change_config(form: str, **change: Any) -> dict[str, Any]:
    return FORMS[form][0] | change


def weights(format_: str, bits: int, kind: str, **change: Any) -> dict[str, Any]:
    return ct(format_, bits, kind, **change)


def dynamic(**rule: Any) -> dict[str, Any]:
    return change_config("gptq 4 bit", dynamic={r"+:.*down_proj.*": rule})


def listed(**layer: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {AT: {"quant_algo": "NVFP4"} | layer},
    }


#: Configs that cannot be, by key: the form of the tensors, and what the config states.
CONFIGS: list[tuple[str, str, dict[str, Any]]] = [
    *(
        ("bits", form, change_config(form, bits=value))
        for form in ("gptq 4 bit", "awq")
        for value in (*NO_BITS, None)
    ),
    *(
        ("group_size", form, change_config(form, group_size=value))
        for form in ("gptq 4 bit", "awq")
        for value in (*NO_SIZES, None)
    ),
    *(("dynamic.+:.*down_proj.*.bits", "gptq 4 bit", dynamic(bits=value)) for value in NO_BITS),
    *(("dynamic.+:.*down_proj.*.group_size", "gptq 4 bit", dynamic(group_size=value)) for value in NO_SIZES),
    *(("desc_act", "gptq 4 bit", change_config("gptq 4 bit", desc_act=value)) for value in NO_FLAGS),
    *(("sym", "gptq 4 bit", change_config("gptq 4 bit", sym=value)) for value in NO_FLAGS),
    ("dynamic", "gptq 4 bit", change_config("gptq 4 bit", dynamic=[{"bits": 8}])),
    ("bits", "gptq 4 bit", {"quant_method": "gptq", "group_size": 64}),
    ("w_bit", "awq", {"quant_method": "awq", "w_bit": 0, "q_group_size": 64}),
    ("q_group_size", "awq", {"quant_method": "awq", "w_bit": 4, "q_group_size": 0}),
    *(
        ("weight_block_size", "fp8 blocks", change_config("fp8 blocks", weight_block_size=value))
        for value in NO_BLOCKS
    ),
    *(
        ("activation_scheme", "fp8 tensor", change_config("fp8 tensor", activation_scheme=value))
        for value in ("odd", 7, True)
    ),
    *(("num_bits", "ct 4 bit", weights("pack-quantized", 4, "int", num_bits=value)) for value in NO_BITS),
    *(
        ("num_bits", "ct int8", weights("int-quantized", 8, "int", strategy="channel", num_bits=value))
        for value in NO_BITS
    ),
    *(
        ("group_size", "ct 4 bit", weights("pack-quantized", 4, "int", group_size=value))
        for value in (*NO_SIZES, -1)
    ),
    *(
        ("group_size", "ct int8", weights("int-quantized", 8, "int", strategy="channel", group_size=value))
        for value in (-7, "x", 1.5)
    ),
    *(
        (
            "block_structure",
            "ct fp8",
            weights("float-quantized", 8, "float", strategy="block", block_structure=value),
        )
        for value in NO_BLOCKS
    ),
    ("strategy", "ct fp8", weights("float-quantized", 8, "float", strategy="zz")),
    ("strategy", "ct fp8", weights("float-quantized", 8, "float", strategy=7)),
    ("type", "ct int8", weights("int-quantized", 8, "zz", strategy="channel")),
    ("symmetric", "ct 4 bit", weights("pack-quantized", 4, "int", symmetric="yes")),
    (
        "weights",
        "ct 4 bit",
        change_config("ct 4 bit", config_groups={"group_0": {"targets": ["Linear"], "weights": 7}}),
    ),
    ("config_groups", "ct 4 bit", change_config("ct 4 bit", config_groups=[1])),
    *(
        ("group_size", form, change_config(form, group_size=value))
        for form in ("modelopt nvfp4", "modelopt awq")
        for value in (*NO_SIZES, -1)
    ),
    *(("group_size", "modelopt nvfp4", listed(group_size=value)) for value in NO_SIZES),
    *(
        ("quant_algo", "modelopt nvfp4", change_config("modelopt nvfp4", quant_algo=value))
        for value in (3, ["NVFP4"], True)
    ),
    ("quant_algo", "modelopt nvfp4", listed(quant_algo=3)),
    ("quantized_layers", "modelopt nvfp4", change_config("modelopt nvfp4", quantized_layers=[AT])),
    *(
        ("bnb_4bit_quant_storage", "bnb nf4", change_config("bnb nf4", bnb_4bit_quant_storage=value))
        for value in ("zz", 8, True)
    ),
    *(
        ("bnb_4bit_quant_type", "bnb nf4", change_config("bnb nf4", bnb_4bit_quant_type=value))
        for value in ("zz", 4)
    ),
    *(
        ("load_in_8bit", "bnb nf4", change_config("bnb nf4", load_in_8bit=value))
        for value in (True, "yes", 1)
    ),
]


@pytest.mark.parametrize(("key", "form", "settings"), CONFIGS, ids=lambda one: str(one)[-60:])
def test_settings_that_cannot_be_are_refused_by_name(
    key: str, form: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config, tensors = model(form)
    folder = write(tmp_path / "in", config | {"quantization_config": settings}, tensors)
    ran = cli("verify", folder)
    (found,) = [f for f in ran.findings if f["severity"] == "error"]
    assert (ran.code, found["code"], found["file"]) == (1, "FS215", "config.json"), ran.out
    assert key in found["message"] and key in found["expected"] and found["got"], found


@pytest.mark.parametrize("form", ["gptq 4 bit", "ct 4 bit", "mlx"])
def test_settings_that_cannot_be_are_refused_everywhere(form: str, tmp_path: Path) -> None:
    if form == "mlx":
        config, tensors = mlx()
        config |= {"quantization": {"group_size": 64, "bits": 0}}
    else:
        config, tensors = model(form)
        settings = {
            "gptq 4 bit": change_config(form, bits=0),
            "ct 4 bit": weights("pack-quantized", 0, "int"),
        }[form]
        config |= {"quantization_config": settings}
    folder = write(tmp_path / "in", config, tensors)
    assert_refused(folder, tmp_path / "out", "bits", None)
    assert cli("merge", folder, tmp_path / "out").code == 1 and not (tmp_path / "out").exists()
    assert [f["code"] for f in cli("inspect", folder).findings if f["severity"] == "error"] == ["FS215"]


@pytest.mark.parametrize("value", [0, -64, "64", 64.5, True, 1 << 62])
@pytest.mark.parametrize("key", ["group_size", "bits"])
def test_settings_of_one_module_of_mlx(key: str, value: Any, tmp_path: Path) -> None:
    config, tensors = mlx()
    config |= {
        "quantization": {"group_size": 64, "bits": 4, AT: {"group_size": 64, "bits": 4} | {key: value}}
    }
    ran = cli("verify", write(tmp_path / "in", config, tensors))
    assert ran.code == 1 and ran.having("FS215", message=f"{AT}.{key}"), ran.out


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_settings_in_a_file_of_the_quantiser(file: str, tmp_path: Path) -> None:
    form, settings = {
        "quantize_config.json": ("gptq 4 bit", {"bits": 0, "group_size": 64}),
        "quant_config.json": ("awq", {"w_bit": 4, "q_group_size": -3}),
        "hf_quant_config.json": (
            "modelopt nvfp4",
            {"quantization": {"quant_algo": "NVFP4", "group_size": 0}},
        ),
    }[file]
    config, tensors = model(form)
    folder = write(tmp_path / "in", {k: v for k, v in config.items() if k != "quantization_config"}, tensors)
    (folder / file).write_text(json.dumps(settings))
    (found,) = [f for f in cli("verify", folder).findings if f["severity"] == "error"]
    assert (found["code"], found["file"]) == ("FS215", file) and file in found["help"], found


#: Configs that can be, though few have them.
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("gptq 4 bit", change_config("gptq 4 bit", sym=None, desc_act=None)),
    (
        "gptq 4 bit",
        change_config(
            "gptq 4 bit", dynamic={"-:.*lm_head.*": {}, "+:.*nothing.*": {"bits": 2, "group_size": -1}}
        ),
    ),
    ("gptq 4 bit", change_config("gptq 4 bit", dynamic={"-:.*lm_head.*": {"bits": 0}})),
    ("gptq 4 bit", change_config("gptq 4 bit", dynamic=None)),
    ("awq", {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}),
    ("fp8 blocks", change_config("fp8 blocks", activation_scheme="DYNAMIC")),
    ("fp8 tensor", change_config("fp8 tensor", weight_block_size=None)),
    ("ct 4 bit", weights("pack-quantized", 4, "int", strategy=None)),
    ("ct fp8", weights("float-quantized", 8, "float", strategy="channel", group_size=None)),
    ("ct fp8", weights("float-quantized", 8, "float", strategy=None, group_size=-1)),
    (
        "ct fp8",
        weights("float-quantized", 8, "FLOAT", strategy="CHANNEL", group_size=None, block_structure=None),
    ),
    (
        "ct fp8",
        change_config(
            "ct fp8",
            config_groups={"W8A8": ["Linear"]}
            | ct("float-quantized", 8, "float", strategy="channel")["config_groups"],
        ),
    ),
    ("modelopt fp8", change_config("modelopt fp8", group_size=0)),
    ("modelopt fp8", change_config("modelopt fp8", group_size=None)),
    ("modelopt nvfp4", change_config("modelopt nvfp4", group_size=None)),
    (
        "modelopt nvfp4",
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"g": {"weights": {"group_size": 16, "num_bits": 4}}},
        },
    ),
    (
        "bnb nf4",
        change_config(
            "bnb nf4",
            load_in_8bit=False,
            bnb_4bit_quant_storage="uint8",
            bnb_4bit_quant_type="nf4",
            llm_int8_threshold=6.0,
        ),
    ),
    (
        "bnb int8",
        change_config(
            "bnb int8", load_in_4bit=False, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage="uint8"
        ),
    ),
]


@pytest.mark.parametrize(("form", "settings"), GOOD, ids=lambda one: str(one)[-60:])
def test_settings_that_can_be_are_taken(form: str, settings: dict[str, Any], tmp_path: Path) -> None:
    config, tensors = model(form)
    folder = write(tmp_path / "in", config | {"quantization_config": settings}, tensors)
    ran = cli("verify", folder)
    assert ran.code == 0, ran.out


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_one_group_for_each_column_is_taken(form: str, tmp_path: Path) -> None:
    """A group size of -1, and one that is larger than the weight."""
    maker = "gptq 4 bit" if form == "gptq" else "awq"
    config, tensors = model(maker)
    for name in tensors:
        if name.endswith((".scales", ".qzeros")):
            tensors[name] = tensors[name][:1].clone()
        if name.endswith(".g_idx"):
            tensors[name] = torch.zeros_like(tensors[name])
    for size in (-1, 1024):
        folder = write(
            tmp_path / str(size),
            config | {"quantization_config": change_config(maker, group_size=size)},
            tensors,
        )
        assert cli("verify", folder).code == 0
        assert cli("merge", folder, tmp_path / f"out{size}", "--dtype", "f16").code == 0


@pytest.mark.parametrize("make", [mlx, mxfp4])
def test_other_models_stay_accepted(make: Any, tmp_path: Path) -> None:
    assert cli("verify", write(tmp_path / "in", *make())).code == 0


NO_EXTENTS: tuple[Any, ...] = (
    [0, 16],
    [1, -5],
    [1, 16.0],
    [True, 16],
    ["1", 16],
    [1, 10**30],
    "1x16",
    0,
    -16,
    1.5,
    {},
)


@pytest.mark.parametrize("value", NO_EXTENTS, ids=str)
def test_block_sizes_of_torchao_that_cannot_be_are_refused(value: Any, tmp_path: Path) -> None:
    folder = torchao(tmp_path / "in", {"block_size": value})
    for verb, *rest in (["verify"], ["merge", tmp_path / "out"]):
        ran = cli(verb, folder, *rest)
        (found,) = [f for f in ran.findings if f["severity"] == "error"]
        assert (ran.code, found["code"], found["tensor"]) == (1, "FS215", "a.weight"), ran.out
        assert "block_size" in found["message"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [[1, 16], [8, 16], 16, None])
def test_block_sizes_of_torchao_that_can_be_are_taken(value: Any, tmp_path: Path) -> None:
    assert cli("verify", torchao(tmp_path / "in", {"block_size": value})).code == 0


@pytest.mark.parametrize("names", [7, "qdata", [1], {"qdata": 1}])
def test_parts_of_torchao_that_are_no_names_are_refused(names: Any, tmp_path: Path) -> None:
    ran = cli("verify", torchao(tmp_path / "in", names=names))
    assert ran.code == 1 and ran.having("FS215", message="_tensor_data_names"), ran.out


@pytest.mark.parametrize("value", [0, -64, "64", 64.5, True, 1 << 62])
def test_group_sizes_of_torchao_that_cannot_be_are_refused(value: Any, tmp_path: Path) -> None:
    folder = torchao(tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    kinds = {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": value}}}
    config["quantization_config"]["quant_type"] = kinds
    (folder / "config.json").write_text(json.dumps(config))
    ran = cli("verify", folder)
    assert ran.code == 1 and ran.having("FS215", message="group_size"), ran.out
    kinds["default"]["_data"]["group_size"] = 64  # type: ignore[index]
    (folder / "config.json").write_text(json.dumps(config))
    assert cli("verify", folder).code == 0
