"""Quantised weights: each form is whole with all its companions, and what is lost, misshapen or contradicts
the config is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import at_once, cli
from quantised_maker import FORMS, LINEAR, Tensors, model, write
from safetensors import safe_open
from safetensors.torch import save_file
from test_families_hf import saved
from test_families_hf import tensors as deepseek

AT = "model.layers.1.mlp.up_proj"
#: Forms that every run tries where each takes long: one of each module.
CHOSEN = (
    "fp8 blocks",
    "mxfp8",
    "ct 4 bit asymmetric",
    "ct nvfp4",
    "modelopt nvfp4",
    "gptq 4 bit",
    "awq",
    "bnb nf4 nested",
)
#: Companions that a weight may lack.
OPTIONAL = (".input_scale", ".weight_format", ".input_global_scale", ".pre_quant_scale")


def own(tensors: Tensors) -> list[str]:
    """The tensors of one weight, the codes first."""
    return [name for name in tensors if name.startswith(f"{AT}.")]


def errors(folder: Path) -> list[dict[str, Any]]:
    return [f for f in cli("verify", folder).findings if f["severity"] == "error"]


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_model_has_no_finding(form: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    folder = write(tmp_path / "in", config, tensors)
    ran = cli("verify", folder, "--fail-on", "warning")
    assert ran.code == 0, ran.out
    # Kept byte for byte, with the companions.
    assert cli("merge", folder, tmp_path / "out").code == 0
    assert cli("diff", folder, tmp_path / "out").code == 0
    # Without the lists of a quantiser, the config alone.
    said = config["quantization_config"]
    bare = {
        key: value
        for key, value in said.items()
        if key not in ("modules_to_not_convert", "ignored_layers", "ignore")
    }
    folder = write(tmp_path / "bare", config | {"quantization_config": bare}, tensors)
    assert cli("verify", folder, "--fail-on", "warning").code == 0


def spread(tensors: Tensors) -> list[str]:
    """One tensor of each kind that a weight has, each of another weight."""
    modules = [f"model.layers.{layer}.{name}" for layer in range(3) for name in LINEAR]
    kinds = [name.removeprefix(AT) for name in own(tensors)]
    return [f"{module}{kind}" for module, kind in zip(modules, kinds, strict=False)]


@pytest.mark.parametrize("form", FORMS)
def test_tensors_that_are_missing_are_named(form: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    gone = spread(tensors)
    folder = write(tmp_path / "in", config, {n: t for n, t in tensors.items() if n not in gone})
    measured = config["quantization_config"].get("activation_scheme") == "static"
    told = {name for name in gone if measured or not name.endswith(OPTIONAL)}
    assert {(f["code"], f["tensor"]) for f in errors(folder)} == {("FS102", name) for name in told}
    assert cli("merge", folder, tmp_path / "out").code == 3 and not (tmp_path / "out").exists()


#: What is made of a tensor that it is not.
OTHERS: dict[str, Any] = {
    "cut": lambda t: t[:-1],
    "longer": lambda t: torch.cat([t, t]),
    "wider": lambda t: t.double(),
    "turned": lambda t: t.T if t.ndim == 2 and t.shape[0] != t.shape[1] else t[:-1],
}


@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize("form", at_once(FORMS, CHOSEN))
def test_tensors_of_another_shape_or_dtype_are_named(form: str, how: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    # The codes' shape is the weight's own. How long a block is stands in the record of bitsandbytes alone,
    # which is not read.
    silent = (".weight_format", "bitsandbytes__nf4") + (
        ("absmax",) if form.startswith("bnb nf4") and how != "wider" else ()
    )
    changed = [name for name in spread(tensors)[1:] if tensors[name].ndim and not name.endswith(silent)]
    folder = write(tmp_path / "in", config, tensors | {name: OTHERS[how](tensors[name]) for name in changed})
    assert {f["tensor"] for f in errors(folder)} == set(changed), errors(folder)


def test_a_grid_without_its_short_block_and_a_transposed_one_are_told_apart(tmp_path: Path) -> None:
    config, tensors = model("fp8 blocks")
    name = f"{AT}.weight_scale_inv"
    for how, words in ((tensors[name][:2], "shorter block has none"), (tensors[name].T, "transposed")):
        folder = write(tmp_path / words.replace(" ", "_"), config, tensors | {name: how})
        (found,) = errors(folder)
        assert words in found["message"] and found["code"] == "FS201", found


@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 tensor", "ct 4 bit", "ct nvfp4", "modelopt nvfp4"])
def test_a_weight_that_was_left_plain_is_named_unless_a_list_says_so(form: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    o, i = LINEAR["mlp.up_proj"]
    plain = {n: t for n, t in tensors.items() if n not in own(tensors)} | {
        f"{AT}.weight": torch.randn(o, i).bfloat16()
    }
    (found,) = errors(write(tmp_path / "in", config, plain))
    assert (found["code"], found["tensor"]) == ("FS215", f"{AT}.weight"), found
    said = dict(config["quantization_config"])
    key = next(k for k in ("modules_to_not_convert", "ignored_layers", "ignore") if k in said)
    said[key] = [*said[key], AT]
    assert errors(write(tmp_path / "listed", config | {"quantization_config": said}, plain)) == []


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("bnb")])
def test_a_config_that_says_another_thing_is_named(form: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    nothing = {key: value for key, value in config.items() if key != "quantization_config"}
    found = errors(write(tmp_path / "nothing", nothing, tensors))
    assert [f["code"] for f in found] == ["FS215"], found
    # The old config beside weights that were written with their values.
    plain = {n: t for n, t in tensors.items() if not n.startswith("model.layers.") or "layernorm" in n}
    for layer in range(3):
        for name, (o, i) in LINEAR.items():
            plain[f"model.layers.{layer}.{name}.weight"] = torch.randn(o, i).bfloat16()
    found = errors(write(tmp_path / "plain", config, plain))
    assert [f["code"] for f in found] == ["FS215"], found
    # bitsandbytes quantises plain weights as they are loaded.
    later = config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert errors(write(tmp_path / "later", later, plain)) == []


def test_what_a_quantiser_says_beside_the_config_is_read(tmp_path: Path) -> None:
    config, tensors = model("modelopt nvfp4")
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    bare = {key: value for key, value in config.items() if key != "quantization_config"}
    name = f"{AT}.weight_scale_2"
    folder = write(tmp_path / "in", bare, {n: t for n, t in tensors.items() if n != name})
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert [f["tensor"] for f in errors(folder)] == [name]


def test_stale_scales_of_a_plain_weight_are_named(tmp_path: Path) -> None:
    config, tensors = model("fp8 blocks")
    o, i = LINEAR["mlp.up_proj"]
    folder = write(tmp_path / "in", config, tensors | {f"{AT}.weight": torch.randn(o, i).bfloat16()})
    assert {(f["code"], f["tensor"]) for f in errors(folder)} >= {("FS207", f"{AT}.weight_scale_inv")}


PACKED = ("ct 4 bit", "ct 3 bit")
#: What a scale is not, by how it is made of one.
NO_SCALES: dict[str, Any] = {
    "NaN": lambda t: t.index_fill(0, torch.tensor([0]), float("nan")),
    "infinite": lambda t: t.index_fill(0, torch.tensor([0]), float("inf")),
    "negative": lambda t: -t,
    "zero": lambda t: t * 0,
}
#: Companions that are factors.
FACTORS = ("_scale", "_scale_inv", "scales", ".scale", "scale_2", "absmax", "SCB")


@pytest.mark.parametrize("how", NO_SCALES)
@pytest.mark.parametrize("form", at_once(FORMS, CHOSEN))
def test_scales_that_are_none_are_named(form: str, how: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    if how == "negative" and form.startswith(("gptq", "awq", *PACKED)):
        # Symmetric integers have a negative scale where the lowest value is the largest (AutoRound).
        signed = {
            name: -tensors[name] for name in spread(tensors) if name.endswith(("scales", "weight_scale"))
        }
        assert errors(write(tmp_path / "signed", config, tensors | signed)) == []
        return
    bad: Tensors = {}
    for name in spread(tensors):
        tensor = tensors[name]
        if not name.endswith(FACTORS) or (name.endswith(OPTIONAL) and how == "negative"):
            continue
        if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
            # A power of two is above zero, and no number is one byte alone; maxima that are quantised are
            # looked up.
            if how == "NaN" and not name.endswith("absmax"):
                last = tensor.view(torch.uint8).clone()
                last.view(-1)[0] = 255
                bad[name] = last.view(tensor.dtype)
        elif not (tensor.dtype == torch.float8_e4m3fn and how == "infinite"):
            flat = NO_SCALES[how](tensor.float().reshape(-1))
            bad[name] = flat.to(tensor.dtype).reshape(tensor.shape)
    if not bad:
        return
    folder = write(tmp_path / "in", config, tensors | bad)
    found = errors(folder)
    assert {f["tensor"] for f in found} == set(bad) and {f["code"] for f in found} <= {"FS306", "FS313"}, (
        found
    )
    assert cli("merge", folder, tmp_path / "out").code == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["fp8 blocks", "ct fp8", "ct nvfp4"])
def test_a_zero_scale_over_zeros_is_no_finding(form: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    code = own(tensors)[0]
    scale = next(name for name in own(tensors) if name.endswith(("_scale", "_scale_inv")))
    zero, none = tensors[code].view(torch.uint8).clone(), tensors[scale].view(torch.uint8).clone()
    zero[:128], none[: 1 if form == "fp8 blocks" else 128] = 0, 0
    zeroed = {code: zero.view(tensors[code].dtype), scale: none.view(tensors[scale].dtype)}
    assert errors(write(tmp_path / "in", config, tensors | zeroed)) == []
    zero[5, 5] = 3
    zeroed[code] = zero.view(tensors[code].dtype)
    (found,) = errors(write(tmp_path / "bad", config, tensors | zeroed))
    assert (found["code"], found["tensor"]) == ("FS313", scale)


@pytest.mark.parametrize("how", ["outside", "below zero", "uneven"])
def test_group_indices_that_are_none_are_named(how: str, tmp_path: Path) -> None:
    config, tensors = model("gptq 4 bit")
    name = f"{AT}.g_idx"
    bad = tensors[name].clone()
    bad[7] = {"outside": 9, "below zero": -1, "uneven": 3}[how]
    (found,) = errors(write(tmp_path / "in", config, tensors | {name: bad}))
    assert (found["code"], found["tensor"]) == ("FS215", name), found
    # Columns in another order have groups of the same size.
    order = torch.randperm(len(bad), generator=torch.Generator().manual_seed(2))
    assert errors(write(tmp_path / "good", config, tensors | {name: tensors[name][order]})) == []


def test_scales_under_two_names_are_named(tmp_path: Path) -> None:
    config, tensors = model("fp8 blocks")
    more = {f"{AT}.weight_scale": tensors[f"{AT}.weight_scale_inv"] * 2}
    (found,) = errors(write(tmp_path / "in", config, tensors | more))
    assert (found["code"], found["tensor"]) == ("FS207", f"{AT}.weight_scale")


def test_very_many_findings_are_counted(tmp_path: Path) -> None:
    config, tensors = model("fp8 blocks")
    experts = {}
    for n in range(60):
        experts[f"model.layers.0.mlp.experts.{n}.up_proj.weight"] = torch.zeros(8, 8).to(torch.float8_e4m3fn)
    found = errors(write(tmp_path / "in", config, tensors | experts))
    assert len(found) <= 22 and found[-1]["count"] == 40, len(found)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8", "weight_block_size": [0, -1]},
        {"quant_method": "fp8", "weight_block_size": "x"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": None, "b": {"weights": {"num_bits": "x"}}},
        },
        {
            "quant_method": "compressed-tensors",
            "format": "marlin-24",
            "config_groups": {"a": {"weights": {}}},
        },
        {"quant_method": "gptq", "bits": 0},
        {"quant_method": "gptq", "bits": 4, "group_size": "x"},
        {"quant_method": ["fp8"]},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_algo": 3},
        {"quant_method": "nobody"},
        {"quant_method": "fp8", "modules_to_not_convert": [f"re:({'.*' * 30}a)+$", "re:" + ".*a" * 90]},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:(a+)+$": {"bits": 8}, "-:(.*)*x": {}}},
        {"quant_method": "fp8", "modules_to_not_convert": [None, 3, "re:(", "*", ""]},
        {"quant_method": "modelopt", "quantized_layers": {"a": None, "b": {"quant_algo": "FP8"}}},
    ],
)
def test_configs_may_say_anything(said: dict[str, Any], tmp_path: Path) -> None:
    for n, form in enumerate(("fp8 blocks", "gptq 4 bit", "ct 4 bit")):
        config, tensors = model(form)
        ran = cli("verify", write(tmp_path / str(n), config | {"quantization_config": said}, tensors))
        assert ran.code in (0, 1, 2, 3) and not ran.having("FS520"), ran.out


def group(bits: int, kind: str, strategy: str, targets: list[str], **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy}
    return {"targets": targets, "weights": weights | more}


def test_the_group_that_names_a_module_most_closely_is_taken(tmp_path: Path) -> None:
    config, tensors = model("ct fp8")
    wide = model("fp8 blocks")[1]
    mixed = {n: t for n, t in tensors.items() if "down_proj" not in n}
    mixed |= {n.replace("_scale_inv", "_scale"): t for n, t in wide.items() if "down_proj" in n}
    said = config["quantization_config"]
    groups = {
        "group_0": group(8, "float", "channel", ["Linear"]),
        "group_1": group(8, "float", "block", ["re:.*down_proj"], block_structure=[128, 128]),
    }
    config |= {"quantization_config": said | {"config_groups": groups}}
    assert errors(write(tmp_path / "in", config, mixed)) == []
    # Layers that no group names are plain.
    some = {"group_0": group(8, "float", "channel", [r"re:.*layers\.(1|2)\..*"])}
    plain = {n: t for n, t in tensors.items() if ".layers.0." not in n or "norm" in n}
    for name, (o, i) in LINEAR.items():
        plain[f"model.layers.0.{name}.weight"] = torch.randn(o, i).bfloat16()
    config |= {"quantization_config": said | {"config_groups": some, "ignore": []}}
    assert errors(write(tmp_path / "some", config, plain)) == []


@pytest.mark.parametrize("status", ["initialized", "frozen"])
def test_weights_that_were_not_compressed_yet_are_plain_beside_their_scales(
    status: str, tmp_path: Path
) -> None:
    config, tensors = model("ct fp8")
    said = config["quantization_config"] | {"quantization_status": status}
    plain = {n: t.to(torch.bfloat16) for n, t in tensors.items()}
    assert errors(write(tmp_path / "in", config | {"quantization_config": said}, plain)) == []
    without = {n: t for n, t in plain.items() if not n.endswith("_scale")}
    assert errors(write(tmp_path / "without", config | {"quantization_config": said}, without)) == []
    # Some tools leave the status as it was and compress: then scales are needed.
    lost = {n: t for n, t in tensors.items() if n != f"{AT}.weight_scale"}
    (found,) = errors(write(tmp_path / "lost", config | {"quantization_config": said}, lost))
    assert (found["code"], found["tensor"]) == ("FS102", f"{AT}.weight_scale")


def test_a_sparse_model_is_not_judged(tmp_path: Path) -> None:
    config, tensors = model("ct fp8")
    said = config["quantization_config"] | {"sparsity_config": {"format": "sparse-24-bitmask"}}
    sparse = {
        n.removesuffix("weight") + "compressed" if n in wide(tensors) else n: t for n, t in tensors.items()
    }
    assert errors(write(tmp_path / "in", config | {"quantization_config": said}, sparse)) == []


def wide(tensors: Tensors) -> list[str]:
    return [name for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn]


def test_rules_for_single_modules_of_gptq_are_followed(tmp_path: Path) -> None:
    config, tensors = model("gptq 4 bit")
    eight = model("gptq 8 bit")[1]
    mixed = {n: eight[n] if "down_proj" in n else t for n, t in tensors.items()}
    said = config["quantization_config"] | {"dynamic": {r"-:.*visual.*": {}, r"+:.*down_proj.*": {"bits": 8}}}
    config |= {"quantization_config": said}
    assert errors(write(tmp_path / "in", config, mixed)) == []
    assert errors(write(tmp_path / "other", config, tensors)) != []


def test_groups_in_order_need_no_indices(tmp_path: Path) -> None:
    for form, count in (("gptq 4 bit", 0), ("gptq 3 bit", 12)):
        config, tensors = model(form)
        none = {n: t for n, t in tensors.items() if not n.endswith(".g_idx")}
        assert len(errors(write(tmp_path / form, config, none))) == count


@pytest.mark.parametrize("around", ["language_model.", "listed"])
def test_lists_name_modules_as_other_classes_call_them(around: str, tmp_path: Path) -> None:
    said, tensors = {}, model("modelopt fp8")[1]
    listed = {
        n.removesuffix(".weight"): {"quant_algo": "FP8"}
        for n, t in tensors.items()
        if t.dtype == torch.float8_e4m3fn
    }
    if around == "listed":
        listed = {n.replace("model.", "model.language_model.", 1): one for n, one in listed.items()}
    else:
        tensors = {f"{around}{n}": t for n, t in tensors.items()}
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    config = model("modelopt fp8")[0] | {"quantization_config": said}
    assert errors(write(tmp_path / "in", config, tensors)) == []
    name = next(n for n in tensors if n.endswith("1.mlp.up_proj.weight_scale"))
    (found,) = errors(write(tmp_path / "lost", config, {n: t for n, t in tensors.items() if n != name}))
    assert (found["code"], found["tensor"]) == ("FS102", name)


def test_bytes_of_bitsandbytes_that_are_viewed_as_floats_are_not_judged(tmp_path: Path) -> None:
    config, tensors = model("bnb nf4")
    said = config["quantization_config"] | {"bnb_4bit_quant_storage": "bfloat16"}
    # What bytes are as floats is chance; here all are finite.
    viewed = {
        n: torch.ones(t.numel() // 2, 1, dtype=torch.bfloat16) if t.dim() == 2 and t.shape[1] == 1 else t
        for n, t in tensors.items()
    }
    assert errors(write(tmp_path / "in", config | {"quantization_config": said}, viewed)) == []


def test_what_others_call_scale_is_none(tmp_path: Path) -> None:
    config, tensors = model("fp8 V4")
    more = {"vision.position.scale": torch.ones(4, 4), "model.layers.0.attn_norm.scale": torch.ones(256)}
    assert errors(write(tmp_path / "in", config, tensors | more)) == []
    # Experts of a model that says nothing are those of that name.
    plain = {
        "a.weight": torch.ones(4, 8, dtype=torch.int8),
        "a.scale": torch.ones(4, 4),
        "b.weight": torch.ones(4, 8),
    }
    bare = {key: value for key, value in config.items() if key != "quantization_config"}
    assert errors(write(tmp_path / "plain", bare, plain)) == []


def test_zero_scales_of_zero_rows_and_experts_are_no_finding(tmp_path: Path) -> None:
    config, tensors = model("bnb int8")
    tensors[f"{AT}.SCB"][5], tensors[f"{AT}.weight"][5] = 0, 0
    assert errors(write(tmp_path / "row", config, tensors)) == []
    tensors[f"{AT}.SCB"][6] = 0
    assert [f["code"] for f in errors(write(tmp_path / "lost", config, tensors))] == ["FS313"]
    at = "model.layers.1.mlp.experts.gate_up_proj"
    stacked = {
        at: torch.randn(3, 256, 128).to(torch.float8_e4m3fn),
        f"{at}_scale_inv": torch.rand(3, 2, 1) + 0.1,
    }
    config = model("fp8 blocks")[0]
    stacked[f"{at}_scale_inv"][1, 0] = 0
    assert [f["code"] for f in errors(write(tmp_path / "expert", config, stacked))] == ["FS313"]
    stacked[at].view(torch.uint8)[1, :128] = 0
    assert errors(write(tmp_path / "none", config, stacked)) == []


def test_records_that_are_of_another_weight_are_named(tmp_path: Path) -> None:
    config, tensors = model("bnb nf4")
    name = f"{AT}.weight.quant_state.bitsandbytes__nf4"
    other = json.dumps(
        {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [10, 10]}
    ).encode()
    for n, raw in enumerate((other, b"\0" * 80, b"[1]")):
        record = torch.tensor(list(raw), dtype=torch.uint8)
        (found,) = errors(write(tmp_path / str(n), config, tensors | {name: record}))
        assert (found["code"], found["tensor"]) == ("FS215", name)
    config, tensors = model("ct 4 bit")
    name = f"{AT}.weight_shape"
    for n, shape in enumerate(([256, 320], [320, 128], [320, 257])):
        (found,) = errors(write(tmp_path / f"shape{n}", config, tensors | {name: torch.tensor(shape)}))
        assert (found["code"], found["tensor"]) == ("FS215", name)


def test_scales_without_any_extent_are_named_and_do_not_end_the_run(tmp_path: Path) -> None:
    config, tensors = model("gptq 4 bit")
    found = errors(write(tmp_path / "in", config, tensors | {f"{AT}.scales": torch.tensor(1.0).half()}))
    assert [(f["code"], f["tensor"]) for f in found] == [("FS201", f"{AT}.scales")]


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scales_of_a_family_that_has_a_table_are_read_too(scale: float, tmp_path: Path) -> None:
    folder = saved("deepseek", tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    whole = dict(deepseek("deepseek"))
    for name in [n for n, t in whole.items() if n.endswith("_proj.weight") and t.ndim == 2]:
        whole[name] = whole[name].to(torch.float8_e4m3fn)
        whole[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    assert errors(folder) == []
    name = "model.layers.2.self_attn.o_proj.weight_scale_inv"
    save_file(whole | {name: torch.full((1, 1), scale)}, folder / "model.safetensors", {"format": "pt"})
    assert [f["tensor"] for f in errors(folder)] == [name]


def test_maxima_that_are_all_alike_have_a_maximum_of_zero(tmp_path: Path) -> None:
    """As bitsandbytes writes a small weight: what its maxima differ by is nothing."""
    config, tensors = model("bnb nf4 nested")
    name = f"{AT}.weight"
    tensors[f"{name}.absmax"].zero_()
    tensors[f"{name}.nested_absmax"].zero_()
    assert not errors(write(tmp_path / "alike", config, tensors))
    tensors[f"{name}.absmax"][7] = 3
    (found,) = errors(write(tmp_path / "lost", config, tensors))
    assert (found["code"], found["tensor"]) == ("FS313", f"{name}.nested_absmax")


def torchao(
    folder: Path,
    data: dict[str, Any] | None = None,
    names: Any = ("qdata", "scale"),
    **changed: torch.Tensor | None,
) -> Path:
    """A file as torchao writes one: what its tensors are stands in the header."""
    record = {
        "_type": "Int8Tensor",
        "_data": {"block_size": [1, 16]} if data is None else data,
        "_tensor_data_names": names,
    }
    header = {
        "a.weight": json.dumps(record),
        "n.weight": json.dumps({"_type": "Tensor"}),
        "tensor_names": json.dumps(["a.weight", "n.weight"]),
    }
    tensors = {
        "a._weight_qdata": torch.ones(8, 16, dtype=torch.int8),
        "a._weight_scale": torch.ones(8, 1),
        "n.weight": torch.ones(16),
    }
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "other", "quantization_config": {"quant_method": "torchao"}})
    )
    save_file(
        {n: t for n, t in (tensors | changed).items() if t is not None}, folder / "model.safetensors", header
    )
    return folder


def test_a_part_of_a_quantised_weight_is_told(tmp_path: Path) -> None:
    config, tensors = model("fp8 blocks")
    folder = write(tmp_path / "in", config, tensors)
    for n, options in enumerate((("--exclude", "*_scale_inv"), ("--include", "*_scale_inv"))):
        ran = cli("merge", folder, tmp_path / str(n), *options)
        assert ran.code == 0 and ran.having(
            "FS102", severity="warning", message="are left out, as requested"
        ), ran.out
    ran = cli("merge", folder, tmp_path / "whole", "--include", "*.up_proj*")
    assert ran.code == 0 and not ran.having("FS102", severity="warning"), ran.out


def headers(folder: Path) -> list[dict[str, str]]:
    """The metadata of each file."""
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found.append({key: text for key, text in opened.metadata().items() if key != "format"})
    return found


def test_a_merge_keeps_what_headers_say_of_tensors_of_torchao(tmp_path: Path) -> None:
    folder = torchao(tmp_path / "in")
    (said,) = headers(folder)
    assert cli("verify", folder).code == cli("ls", folder).code == 0
    assert cli("merge", folder, tmp_path / "one").code == 0
    assert headers(tmp_path / "one") == [said]
    # Readers keep the list of the last file.
    assert cli("merge", folder, tmp_path / "several", "--max-shard-size", "100B").code == 0
    assert headers(tmp_path / "several") == [said] * 2
    assert cli("verify", tmp_path / "several").code == 0
    assert cli("convert", tmp_path / "several", tmp_path / "hf", "--to", "hf").code == 0
    assert headers(tmp_path / "hf") == [said]
    assert cli("merge", folder, tmp_path / "part", "--include", "a.*").code == 0
    assert headers(tmp_path / "part") == [
        {"a.weight": said["a.weight"], "tensor_names": json.dumps(["a.weight"])}
    ]


def test_torchao_is_not_written_where_its_headers_would_be_untrue(tmp_path: Path) -> None:
    folder = torchao(tmp_path / "in")
    for options in (("merge", "--dtype", "bf16"), ("convert", "--to", "dcp"), ("merge", "--vocab-size", "8")):
        ran = cli(options[0], folder, tmp_path / "out", *options[1:])
        assert ran.code == 2 and ran.having("FS514", message="torchao describes its tensors in the header"), (
            ran.out
        )
        assert not (tmp_path / "out").exists()


def test_torchao_is_judged_by_its_headers(tmp_path: Path) -> None:
    (found,) = errors(torchao(tmp_path / "lost", **{"a._weight_scale": None}))
    assert (found["code"], found["tensor"]) == ("FS102", "a._weight_scale")
    ran = cli("merge", torchao(tmp_path / "in"), tmp_path / "out", "--exclude", "*_scale")
    assert ran.code == 0 and ran.having("FS102", severity="warning", message="are left out, as requested"), (
        ran.out
    )


def in_two(folder: Path, header: dict[str, str]) -> Path:
    """The file of torchao beside another one, which has this header."""
    torchao(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    tensors = {"b._weight_qdata": torch.ones(8, dtype=torch.int8)}
    record = {"b.weight": json.dumps({"_type": "X", "_tensor_data_names": ["qdata"]}), "tensor_names": "[]"}
    save_file(tensors, folder / "model-00002-of-00002.safetensors", record | header)
    return folder


def test_headers_of_torchao_that_differ_are_of_two_models(tmp_path: Path) -> None:
    folder = in_two(tmp_path / "two", {"a.weight": json.dumps({"_type": "Tensor"})})
    found = errors(folder)
    assert [(one["code"], one["tensor"]) for one in found] == [("FS211", "a.weight")], found


def test_a_tensor_that_a_header_of_torchao_lists_alone_is_named(tmp_path: Path) -> None:
    folder = in_two(tmp_path / "two", {"tensor_names": '["b.weight", "c.weight"]'})
    found = errors(folder)
    assert [(one["code"], one["tensor"]) for one in found] == [("FS211", "c.weight")], found
    for n, text in enumerate(("{}", "no JSON", "[1, null]", "[" * 5000)):
        assert not errors(in_two(tmp_path / f"odd{n}", {"tensor_names": text})), text


def test_what_headers_of_torchao_say_besides_is_no_tensor(tmp_path: Path) -> None:
    """transformers lists tied weights and names in memory, others write sizes: none of them need be in a
    file."""
    (said,) = headers(torchao(tmp_path / "one"))
    other_order = json.dumps(dict(reversed(json.loads(said["a.weight"]).items())))
    more = {"lm_head.weight": json.dumps({"_type": "Tensor"}), "total_size": "12", "a.weight": other_order}
    folder = in_two(tmp_path / "in", more)
    assert not errors(folder)
    assert cli("merge", folder, tmp_path / "out").code == 0
    (written,) = headers(tmp_path / "out")
    assert sorted(json.loads(written["tensor_names"])) == [
        "a.weight",
        "b.weight",
        "lm_head.weight",
        "n.weight",
    ]
    assert "total_size" not in written


def test_a_header_of_torchao_that_is_not_read_in_full_is_not_written(tmp_path: Path) -> None:
    long = json.dumps({"_type": "Tensor", "x": "y" * (17 << 20)})
    folder = in_two(tmp_path / "in", {"c.weight": long})
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == 2 and ran.having("FS514", message="a header of torchao is larger"), ran.out
    assert (
        cli("merge", folder / "model-00001-of-00002.safetensors", tmp_path / "part", "--accept", "part").code
        == 0
    )
    assert headers(tmp_path / "part")[0].keys() == {"a.weight", "n.weight", "tensor_names"}
