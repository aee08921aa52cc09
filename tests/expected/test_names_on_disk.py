"""Names in memory to names on disk: tables that are made of a list of expected tensors, and what they
refuse."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from families_maker import SIZES, WHOLE, made
from fastshard.expected import (
    expected_list,
    from_transformers,
    names_on_disk,
    transformers_worker,
)
from fastshard.expected.expected_list import ExpectedTensor, ExpectedTensors, Part
from helpers import ask_transformers_here, cli, read_result
from holding import HANG
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
DOWN, UP = "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"


def listed(config: dict[str, Any]) -> ExpectedTensors:
    """The worker's list, made in this process."""
    asked = {"config": from_transformers.cleaned(config), "class": config["architectures"][0]}
    told = json.loads(json.dumps(transformers_worker.listed(asked)))
    return expected_list.from_document(expected_list.document_of(told), "memory")


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A model as save_pretrained writes it, with its list beside it; and its tensors in memory."""
    folder = tmp_path_factory.mktemp("olmoe")
    model = made("OlmoeForCausalLM")
    model.config.architectures = ["OlmoeForCausalLM"]
    model.save_pretrained(folder / "own")
    document = listed(json.loads((folder / "own/config.json").read_text())).to_document()
    (folder / "list.json").write_text(json.dumps(document))
    return folder, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def filled(model: Any) -> Any:
    """The model with random values everywhere: experts are whatever was in memory until they are loaded."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def in_memory(at: Path, tensors: Tensors, config: Path, kind: str) -> Path:
    at.mkdir()
    if kind == "dcp":
        dcp.save({"model": tensors}, checkpoint_id=at, no_dist=True)
    elif kind == "torch":
        torch.save(tensors, at / "pytorch_model.bin")
    else:
        save_file(
            {name: t.clone() for name, t in tensors.items()}, at / "model.safetensors", {"format": "pt"}
        )
    shutil.copy(config, at / "config.json")
    return at


@pytest.mark.parametrize("kind", ["dcp", "torch", "safetensors"])
def test_fused_experts_are_written_each(kind: str, olmoe: tuple[Path, Tensors], tmp_path: Path) -> None:
    folder, tensors = olmoe
    source = in_memory(tmp_path / "in", tensors, folder / "own/config.json", kind)
    for verb in (("merge",), ("convert", "--to", "hf")):
        out = tmp_path / verb[0]
        ran = cli(verb[0], source, out, *verb[1:], "--like", folder / "list.json")
        assert ran.code == 0, ran.out
        got, want = load_file(out / "model.safetensors"), load_file(folder / "own/model.safetensors")
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert cli("verify", tmp_path / "merge", "--like", folder / "list.json").code == 0
    # A merge that is not asked for other names keeps those that there are.
    assert cli("merge", source, tmp_path / "kept").code == 0
    assert load_file(tmp_path / "kept/model.safetensors").keys() >= {UP, DOWN}


def damage(at: Path, change: dict[str, Any], olmoe: tuple[Path, Tensors]) -> tuple[str, Path]:
    """The name of the tensor that is changed or lost, and a DCP of the others as they were."""
    folder, tensors = olmoe
    (name, how), *_ = change.items()
    kept = {n: t for n, t in tensors.items() if n != name}
    changed = kept if how is None else kept | {name: how(tensors.get(name, torch.ones(1)))}
    return name, in_memory(at, changed, folder / "own/config.json", "dcp")


DAMAGES: list[tuple[dict[str, Any], int]] = [
    ({DOWN: None}, 3),
    ({UP: lambda t: t[:3]}, 1),
    ({UP: lambda t: t[:, :48]}, 1),
    ({UP: lambda t: t.transpose(1, 2).contiguous()}, 1),
    ({"model.norm.weight": None}, 3),
    ({"model.layers.0.self_attn.q_proj.weight": lambda t: t[:16]}, 1),
    ({"lm_head.weight": lambda t: t + 1}, 1),
    ({"model.layers.1.mlp.experts.more": lambda t: torch.ones(3)}, 1),
]


@pytest.mark.parametrize(("change", "code"), DAMAGES)
def test_what_is_damaged_is_not_written(
    change: dict[str, Any], code: int, olmoe: tuple[Path, Tensors], tmp_path: Path
) -> None:
    name, source = damage(tmp_path / "in", change, olmoe)
    for verb in (("merge",), ("convert", "--to", "hf")):
        ran = cli(verb[0], source, tmp_path / "out", *verb[1:], "--like", olmoe[0] / "list.json")
        assert ran.code == code and not (tmp_path / "out").exists(), ran.out
        assert any(f.get("tensor") == name for f in ran.findings if f["severity"] == "error"), ran.out


def test_a_conversion_asks_for_the_names_on_disk_by_itself(
    olmoe: tuple[Path, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are taken apart, and the copy of the tied head is left out, as save_pretrained does."""
    folder, tensors = olmoe
    source = in_memory(tmp_path / "in", tensors, folder / "own/config.json", "dcp")
    ask_transformers_here(monkeypatch, tmp_path / "cache")
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert ran.code == 0 and ran.having("FS212", message="save_pretrained of OlmoeForCausalLM"), ran.out
    got, want = load_file(tmp_path / "out/model.safetensors"), load_file(folder / "own/model.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert cli("verify", source).code == cli("merge", source, tmp_path / "merged").code == 0
    assert load_file(tmp_path / "merged/model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_every_rank_of_a_run_asks_for_the_names(
    dtype: str, olmoe: tuple[Path, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tensors = olmoe
    source = in_memory(tmp_path / "in", tensors, folder / "own/config.json", "dcp")
    ask_transformers_here(monkeypatch, tmp_path / "cache")

    def run(rank: int) -> fastshard.Manifest:
        return fastshard.convert(
            source, tmp_path / "out", "hf", dtype=dtype, rank=rank, world=2, timeout=HANG
        )

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(run, range(2))
    assert first.document["plan"] == second.document["plan"]
    want = load_file(folder / "own/model.safetensors")
    assert read_result(tmp_path / "out").keys() == want.keys()


@pytest.mark.parametrize(("change", "code"), DAMAGES)
def test_what_is_damaged_is_not_converted(
    change: dict[str, Any],
    code: int,
    olmoe: tuple[Path, Tensors],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, source = damage(tmp_path / "in", change, olmoe)
    ask_transformers_here(monkeypatch, tmp_path / "cache")
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    if name.endswith("more"):  # a loader passes over what it does not know
        assert ran.code == 0 and name in load_file(tmp_path / "out/model.safetensors"), ran.out
        return
    assert ran.code == code and not (tmp_path / "out").exists(), ran.out
    assert any(f.get("tensor") == name for f in ran.errors), ran.out


# Experts that are fused and a head of its own, and a prefix that moves, which is as many names again.
@pytest.mark.parametrize("kind", ["Qwen3MoeForCausalLM", "OlmoeForCausalLM", "LlavaForConditionalGeneration"])
def test_names_in_memory_become_those_on_disk(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_transformers_here(monkeypatch, tmp_path / "cache")
    kinds = getattr(transformers, kind)
    model = filled(kinds(kinds.config_class(**WHOLE[kind] | {"tie_word_embeddings": False})))
    model.save_pretrained(tmp_path / "own")
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    source = in_memory(tmp_path / "in", tensors, tmp_path / "own/config.json", "dcp")
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.out
    got, want = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "own/model.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert cli("convert", tmp_path / "own", tmp_path / "same", "--to", "hf").code == 0


@pytest.mark.parametrize("verb", [("merge",), ("convert", "--to", "hf")])
def test_a_tied_head_that_alone_is_stored_is_written_under_the_name_on_disk(
    verb: tuple[str, ...], olmoe: tuple[Path, Tensors], tmp_path: Path
) -> None:
    """safetensors.save_model keeps the first name by the alphabet."""
    folder, tensors = olmoe
    kept = {name: t for name, t in tensors.items() if name != "model.embed_tokens.weight"}
    source = in_memory(tmp_path / "in", kept, folder / "own/config.json", "safetensors")
    ran = cli(verb[0], source, tmp_path / "out", *verb[1:], "--like", folder / "list.json")
    assert ran.code == 0, ran.out
    got, want = load_file(tmp_path / "out/model.safetensors"), load_file(folder / "own/model.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_a_vocabulary_that_grew_since_the_reference_is_what_the_own_config_says(
    olmoe: tuple[Path, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_transformers_here(monkeypatch, tmp_path / "cache")
    folder, tensors = olmoe
    model = made("OlmoeForCausalLM")
    model.config.architectures = ["OlmoeForCausalLM"]
    model.load_state_dict(tensors)
    model.resize_token_embeddings(104)
    model.save_pretrained(tmp_path / "own")
    grown = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    source = in_memory(tmp_path / "in", grown, tmp_path / "own/config.json", "dcp")
    ran = cli("merge", source, tmp_path / "out", "--like", folder / "own")
    assert ran.code == 0 and ran.having("FS212", expected="vocab_size 96"), ran.out
    got, want = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "own/model.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    # A config that says nothing of it does not excuse it.
    shutil.copy(folder / "own/config.json", source)
    assert cli("merge", source, tmp_path / "again", "--like", folder / "own").code == 1


# --- forms


def tables(memory: dict[str, list[int]], disk: dict[str, tuple[list[int], list[Part] | None]]) -> Any:
    def each(shapes: dict[str, list[int]]) -> tuple[ExpectedTensor, ...]:
        return tuple(ExpectedTensor(name, "F32", tuple(shape)) for name, shape in shapes.items())

    made_of = {name: None if parts is None else tuple(parts) for name, (_, parts) in disk.items()}
    on_disk = each({name: shape for name, (shape, _) in disk.items()})
    return names_on_disk.tables_of(
        ExpectedTensors("Odd", "odd", "5.0.0", on_disk, each(memory), made_of, (), (), ()), memory
    )


def test_interleaved_rows_and_heads_have_forms() -> None:
    """Every second row is a part, and dimensions of memory become one."""
    halves = {f"p{i}": ([3, 4], [Part("w", 4 * i, (0, 0), (((3, 8),), ((4, 1),)))]) for i in range(2)}
    in_memory, on_disk = tables({"w": [6, 4]}, halves)
    assert [rule.dimensions for rule in in_memory.rules] == [["d0x3*(p0:1|p1:1)", "d1x4"]]
    flat = {"f": ([2, 12], [Part("w", 0, (0, 0), (((2, 12),), ((12, 1),)))])}
    in_memory, on_disk = tables({"w": [2, 3, 4]}, flat)
    assert [rule.dimensions for rule in on_disk.rules] == [["d0x2", "d1x3*d1x4"]]


FORMLESS: dict[str, tuple[dict[str, list[int]], dict[str, tuple[list[int], list[Part] | None]]]] = {
    "computed": ({"w": [4]}, {"x": ([4], None)}),
    "rows left out": ({"w": [6, 4]}, {"x": ([5, 4], [Part("w", 0, (0, 0), (((5, 4),), ((4, 1),)))])}),
    "rows twice": (
        {"w": [6, 4]},
        {name: ([6, 4], [Part("w", 0, (0, 0), (((6, 4),), ((4, 1),)))]) for name in "xy"},
    ),
    "beyond its end": ({"w": [2, 4]}, {"x": ([3, 4], [Part("w", 0, (0, 0), (((3, 4),), ((4, 1),)))])}),
    "not from the model": ({"w": [4]}, {"x": ([4], [Part("v", 0, (0,), (((4, 1),),))])}),
    "overlapping": (
        {"v": [3], "w": [3]},
        {"x": ([5], [Part("v", 0, (0,), (((3, 1),),)), Part("w", 0, (2,), (((3, 1),),))])},
    ),
    "a hole": (
        {"v": [3], "w": [3]},
        {"x": ([7], [Part("v", 0, (0,), (((3, 1),),)), Part("w", 0, (4,), (((3, 1),),))])},
    ),
    "shared by both": (
        {"v": [4], "w": [4]},
        {
            "x": ([4], [Part("v", 0, (0,), (((2, 1),),)), Part("w", 0, (2,), (((2, 1),),))]),
            "y": ([4], [Part("v", 2, (0,), (((2, 1),),)), Part("w", 2, (2,), (((2, 1),),))]),
        },
    ),
    "no part on disk": ({"v": [4], "w": [4]}, {"v": ([4], [Part("v", 0, (0,), (((4, 1),),))])}),
    "names without numbers": (
        {"w": [2, 4]},
        {f"x.{name}.weight": ([4], [Part("w", 4 * i, (0,), (((4, 1),),))]) for i, name in enumerate("ab")},
    ),
    "numbers that are others": (
        {"w": [2, 4]},
        {f"x.{i + 1}.weight": ([4], [Part("w", 4 * i, (0,), (((4, 1),),))]) for i in range(2)},
    ),
    "brackets": ({"w{": [4]}, {"x": ([4], [Part("w{", 0, (0,), (((4, 1),),))])}),
    "nonsense": ({"w": [4]}, {"x": ([4], [Part("w", -3, (0,), (((-4, 0), (0, 7)),))])}),
    "outside": ({"w": [4]}, {"x": ([4], [Part("w", 4, (0,), (((4, 1),),))])}),
    "no dimensions": ({"w": [4]}, {"x": ([4], [Part("w", 0, (), ())])}),
    "no parts": ({"w": [4]}, {"x": ([4], [])}),
}


@pytest.mark.parametrize("case", FORMLESS)
def test_parts_without_a_form_are_refused(case: str) -> None:
    with pytest.raises(fastshard.FastshardError) as refused:
        tables(*FORMLESS[case])
    assert refused.value.findings[0].code == "FS514"


#: Numbers that are none, and as many dimensions as there are not.
PARTLESS: list[Any] = [
    [["w", offset, [0], [[[4, 1]]]]] for offset in (-1, 0.5, True, "0", 1 << 62, float("inf"), float("nan"))
] + [
    [["w", 0, [0, 0], [[[4, 1]]]]],
    [["w", 0, [], [[[4, 1]]]]],
    [["w", 0, "0", [[[4, 1]]]]],
    [["w", 0, [0], [[[1, 1], [4, 1]]]]],
    [["w", 0, [0], [[[4, -1]]]]],
    [["w", 0, [0], [[[2, 1]] * 100_000]]],
]


def test_a_list_whose_parts_are_none_is_refused(olmoe: tuple[Path, Tensors], tmp_path: Path) -> None:
    folder, _ = olmoe
    document = json.loads((folder / "list.json").read_text())
    name = next(iter(document["made"]))
    for parts in ([["w"]], 3, [["w", "x", [0], []]], [[3, 0, [0], [[[4, 1]]]]], {"w": 1}, *PARTLESS):
        (tmp_path / "list.json").write_text(json.dumps(document | {"made": {name: parts}}))
        ran = cli("verify", folder / "own", "--like", tmp_path / "list.json")
        assert ran.code == 2 and ran.having("FS211", severity="error"), (parts, ran.out)


@pytest.mark.parametrize("kind", ["KimiK25", "Gte"])
def test_rotated_and_fused_projections_are_written_as_save_pretrained_does(kind: str, tmp_path: Path) -> None:
    """Rows of queries and keys change their order, and several tensors in memory are one on disk."""
    if kind == "Gte":
        config = transformers.GteConfig(**SIZES)
        model = transformers.GteForMaskedLM(config)
    else:
        vision = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        }
        config = transformers.AutoConfig.for_model("kimi_k25")
        config.vision_config = type(config.vision_config)(**vision)
        for key, value in (
            ("num_hidden_layers", 1),
            ("hidden_size", 32),
            ("vocab_size", 96),
            ("n_routed_experts", 4),
        ):
            setattr(config.text_config, key, value)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    filled(model).save_pretrained(tmp_path / "own")
    found = listed(json.loads((tmp_path / "own/config.json").read_text()))
    (tmp_path / "list.json").write_text(json.dumps(found.to_document()))
    source = in_memory(tmp_path / "in", dict(model.state_dict()), tmp_path / "own/config.json", "dcp")
    assert cli("merge", source, tmp_path / "out", "--like", tmp_path / "list.json").code == 0
    got, want = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "own/model.safetensors")
    assert all(torch.equal(got[name], want[name]) for name in want)
    moved = [
        name for name, parts in found.made.items() if any(len(d) > 1 for p in parts or () for d in p.dims)
    ]
    assert moved or any(len(parts or ()) > 1 for parts in found.made.values())


HEADLESS: dict[str, dict[str, Any]] = {
    "MixtralModel": SIZES | {"num_key_value_heads": 2, "num_local_experts": 4},
    "MixtralForSequenceClassification": SIZES
    | {"num_key_value_heads": 2, "num_local_experts": 4, "pad_token_id": 0},
    "Qwen3MoeModel": SIZES
    | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24},
}


@pytest.mark.parametrize("kind", HEADLESS)
def test_classes_without_an_output_layer_are_written_so_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table tells of their family, and not their names."""
    ask_transformers_here(monkeypatch, tmp_path / "cache")
    of = getattr(transformers, kind)
    model = filled(of(of.config_class(**HEADLESS[kind])))
    model.save_pretrained(tmp_path / "own")
    config = tmp_path / "own/config.json"
    source = in_memory(tmp_path / "in", dict(model.state_dict()), config, "dcp")
    want = load_file(tmp_path / "own/model.safetensors")
    to_hf = ("convert", "--to", "hf")
    for number, like in enumerate(((), ("--like", config), ("--like", tmp_path / "own"))):
        for verb in (("merge",), to_hf) if like else (to_hf,):
            out = tmp_path / f"{verb[0]}{number}"
            assert cli(verb[0], source, out, *verb[1:], *like).code == 0
            got = load_file(out / "model.safetensors")
            assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
