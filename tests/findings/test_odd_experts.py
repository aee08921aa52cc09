"""Experts that are copied, missing, swapped, or never written, in every container; and experts in one tensor
or apart, which mean the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import expert_damages
import fastshard
import pytest
import torch
from expert_damages import CONTAINERS, EXPERTS, LAYERS, MATRICES
from fastshard.checkpoint import expert_values
from helpers import Ran, cli, edit_pt, edit_safetensors, read_result
from safetensors.torch import save_file

FUSED, APART = expert_damages.save_fused, expert_damages.save_apart
#: Experts that lie apart are compared within their layer by the core, in its own words.
OF_TENSORS = {"hf_apart", "megatron_sequential", "megatron_grouped"}
#: With all layers in one tensor.
OF_LAYERS = {"torch_dist", "maxtext", "maxtext_first_axis"}


def odd(ran: Ran, *severities: str) -> list[dict[str, Any]]:
    """Findings about copies and zeros."""
    return [f for f in ran.findings if f["code"] in ("FS304", "FS313") and f["severity"] in severities]


def told(ran: Ran) -> list[str]:
    return [f["message"] for f in odd(ran, "warning")]


def check(folder: Path, tmp_path: Path) -> Ran:
    """Verifies a checkpoint that passes; a merge says the same of it."""
    verified, merged = cli("verify", folder), cli("merge", folder, tmp_path / "merged")
    assert verified.code == 0 and merged.code == 0, verified.out
    assert bool(told(verified)) == bool(told(merged))
    assert cli("verify", folder, "--fail-on", "warning").code == bool(told(verified))
    return verified


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", ["copied", "copied_across"])
def test_an_expert_that_is_another_one_is_named(kind: str, container: str, tmp_path: Path) -> None:
    folder = CONTAINERS[container](expert_damages.damage(kind), tmp_path / "run")
    ran = check(folder, tmp_path)
    layer = 1 if kind == "copied" else 2
    if kind == "copied" and container in OF_TENSORS:
        assert told(ran) and all("hold the same values" in text for text in told(ran))
        assert all("3" in text and "5" in text and "layers.1." in text for text in told(ran))
    else:
        (found,) = odd(ran, "warning")
        assert found["code"] == "FS304"
        assert found["message"].startswith(
            f"expert 5 of layer {layer} holds the same values as expert 3 of layer 1, in "
        )
        assert found["got"] == "those of expert 3 of layer 1" and "expert" in found["tensor"] + "expert"
    assert cli("verify", folder, "--fail-on", "warning", "--ignore", "FS304").code == 0


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_conversion_names_the_copied_expert_too(container: str, tmp_path: Path) -> None:
    folder = CONTAINERS[container](expert_damages.damage("copied_across"), tmp_path / "run")
    config = FUSED(expert_damages.good(), tmp_path / "good") / "config.json"
    ran = cli("convert", folder, tmp_path / "out", "--to", "hf", "--vocab-size", "250", "--config", config)
    assert ran.code == 0, ran.out
    assert [text for text in told(ran) if text.startswith("expert 5 of layer 2 holds the same values")]


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_expert_of_one_value_is_named(container: str, tmp_path: Path) -> None:
    folder = CONTAINERS[container](expert_damages.damage("constant"), tmp_path / "run")
    (found,) = odd(check(folder, tmp_path), "warning")
    assert found["code"] == "FS313" and found["got"] == f"{expert_damages.CONSTANT} everywhere"
    assert found["message"].startswith("expert 3 of layer 1 is constant, in ")


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_expert_of_zeros_is_named(container: str, tmp_path: Path) -> None:
    folder = CONTAINERS[container](expert_damages.damage("zeros"), tmp_path / "run")
    found = odd(check(folder, tmp_path), "warning")
    assert found and all(f["code"] == "FS313" for f in found)
    if container in OF_LAYERS:
        (one,) = found
        assert one["message"].startswith("expert 3 of layer 1 is constant, in ")
        assert one["got"] == "zeros"
    elif container not in OF_TENSORS:
        assert {f["got"] for f in found} == {"zeros in index 3 of dim 0"}
    merged = cli("merge", folder, tmp_path / "again")
    if container not in OF_TENSORS:
        # Parts of tensors that are zero are the work of a verification.
        (text,) = told(merged)
        assert text.startswith("expert 3 of layer 1 is constant, in ")


@pytest.mark.parametrize("container", CONTAINERS)
def test_experts_that_are_all_zero_are_named(container: str, tmp_path: Path) -> None:
    folder = CONTAINERS[container](expert_damages.damage("all_zeros"), tmp_path / "run")
    assert odd(check(folder, tmp_path), "warning")


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", ["good", "fresh"])
def test_nothing_is_said_of_a_good_or_a_fresh_model(kind: str, container: str, tmp_path: Path) -> None:
    state = expert_damages.good()
    if kind == "fresh":
        torch.manual_seed(3)
        for name, tensor in state.items():
            tensor.fill_(1) if name.endswith("norm.weight") else tensor.normal_(0, 0.02)
    ran = check(CONTAINERS[container](state, tmp_path / "run"), tmp_path)
    assert not odd(ran, "warning", "note")


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_mixture_that_was_made_of_one_expert_is_a_note(container: str, tmp_path: Path) -> None:
    ran = check(CONTAINERS[container](expert_damages.damage("made_of_one"), tmp_path / "run"), tmp_path)
    # Of files that are copies it is said as a warning, as it is of models without experts.
    assert all("a copy of" in text for text in told(ran))


@pytest.mark.parametrize("container", sorted(CONTAINERS.keys() - OF_TENSORS))
def test_the_half_of_a_rank_that_is_another_s_is_told(container: str, tmp_path: Path) -> None:
    ran = cli("verify", CONTAINERS[container](expert_damages.damage("rank_as_another"), tmp_path / "run"))
    copies = [f for f in ran.findings if f["code"] in ("FS303", "FS304")]
    assert copies and (ran.code == 1 or "experts hold matrices of another expert" in copies[0]["message"])


def test_many_copied_experts_are_one_warning(tmp_path: Path) -> None:
    state = expert_damages.good()
    for layer in range(1, LAYERS):
        for number in (0, 1):
            for name in MATRICES:
                source = expert_damages.stack(state, 0, name)[5 + number]
                expert_damages.stack(state, layer, name)[number] = source
    (text,) = told(check(FUSED(state, tmp_path / "run"), tmp_path))
    assert text.startswith(
        "6 experts hold the values of another expert: expert 0 of layer 1 holds those of expert 5"
    )
    assert text.endswith("; and 2 more")


def test_as_many_layers_as_experts_are_told_by_index(tmp_path: Path) -> None:
    """Nothing in the tensor says which of two equal dimensions counts layers."""
    state = torch.randn(4, 4, 12, 16, generator=torch.Generator().manual_seed(0))
    state[2, 1] = state[0, 3]
    save_file({"decoder.layers.mlp.experts.w1": state}, tmp_path / "model.safetensors")
    ran = cli("verify", tmp_path)
    assert "index [2, 1] of decoder.layers.mlp.experts holds the same values as index [0, 3]" in ran.out


# Missing


def drop_expert(state: expert_damages.State, layers: range, number: int = 3) -> expert_damages.State:
    """The tensors without an expert in some layers: one fewer in the tensor that holds them."""
    for layer in layers:
        for name in MATRICES:
            stack = expert_damages.stack(state, layer, name)
            kept = [n for n in range(EXPERTS) if n != number]
            state[f"model.layers.{layer}.mlp.experts.{name}"] = stack[kept]
    return state


@pytest.mark.parametrize("layers", [range(1, 2), range(LAYERS)], ids=["one_layer", "all_layers"])
@pytest.mark.parametrize("container", ["hf_fused", "torchtitan"])
def test_a_tensor_with_an_expert_less_is_refused(container: str, layers: range, tmp_path: Path) -> None:
    folder = CONTAINERS[container](drop_expert(expert_damages.good(), layers), tmp_path / "run")
    for command in (("verify", folder), ("merge", folder, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 1 and ran.having("FS201", tensor="layers.1.", got="[7, "), ran.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["matrix", "expert"])
def test_a_missing_expert_of_a_model_with_experts_apart_is_named(what: str, tmp_path: Path) -> None:
    folder = APART(expert_damages.good(), tmp_path / "run")
    begin = "model.layers.1.mlp.experts.3." + ("down_proj" if what == "matrix" else "")

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(begin)]:
            del tensors[name]

    edit_safetensors(folder / "model.safetensors", drop)
    for command in (("verify", folder), ("merge", folder, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 3 and ran.having("FS102", tensor=begin), ran.out
        assert len(ran.errors) == (1 if what == "matrix" else 3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["sequential", "grouped", "flat"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_of_experts_is_named(rank: int, form: str, tmp_path: Path) -> None:
    folder = CONTAINERS[f"megatron_{form}"](expert_damages.good(), tmp_path / "run")
    shutil.rmtree(folder / f"iter_0000010/mp_rank_00_{rank:03d}")
    for command in (("verify", folder), ("merge", folder, tmp_path / "out")):
        ran = cli(*command)
        (found,) = ran.errors
        assert (ran.code, found["code"], found["rank"]) == (3, "FS101", f"tp 0, pp 0, ep {rank}"), ran.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "dropped", "named"),
    [
        ("sequential", "local_experts.1.linear_fc1.weight", "local_experts.5.linear_fc1.weight"),
        ("grouped", "linear_fc2.weight2", "linear_fc2.weight6"),
        ("flat", "weight2", "weight2"),
    ],
)
def test_a_missing_expert_of_a_rank_has_the_number_of_the_model(
    form: str, dropped: str, named: str, tmp_path: Path
) -> None:
    folder = CONTAINERS[f"megatron_{form}"](expert_damages.good(), tmp_path / "run")
    begin = "decoder.layers.1.mlp.experts."
    edit_pt(
        folder / "iter_0000010/mp_rank_00_001/model_optim_rng.pt",
        lambda content: content["model"].pop(begin + dropped),
    )
    ran = cli("convert", folder, tmp_path / "out", "--to", "hf", "--vocab-size", "250")
    (found,) = ran.having("FS102")
    assert ran.code == 3 and found["tensor"] == begin + named, ran.out
    assert form != "flat" or found["rank"] == "ep 1"
    assert not (tmp_path / "out").exists()


def test_missing_files_of_stores_are_refused(tmp_path: Path) -> None:
    folder = CONTAINERS["torch_dist"](expert_damages.good(), tmp_path / "torch_dist")
    (folder / "release/__1_1.distcp").unlink()
    ran = cli("verify", folder)
    assert ran.code == 3 and ran.having("FS101", file="__1_1.distcp", rank="rank 1"), ran.out
    folder = CONTAINERS["maxtext"](expert_damages.good(), tmp_path / "maxtext")
    array = folder / "7/items/params.params.decoder.layers.moe_block.wo"
    next(file for file in array.iterdir() if file.name[0].isdigit()).unlink()
    ran = cli("verify", folder)
    assert ran.code == 3 and ran.having("FS111", tensor="moe_block.wo"), ran.out
    shutil.rmtree(array)
    ran = cli("verify", folder)
    assert ran.code == 3 and ran.having("FS102", tensor="moe_block.wo"), ran.out


# Swapped


@pytest.mark.parametrize("container", CONTAINERS)
def test_swapped_experts_are_found_with_a_reference(container: str, tmp_path: Path) -> None:
    """Nothing in the files numbers an expert besides its place; a manifest or the original does."""
    good = CONTAINERS[container](expert_damages.good(), tmp_path / "good")
    swapped = CONTAINERS[container](expert_damages.damage("swapped"), tmp_path / "swapped")
    assert not odd(check(swapped, tmp_path), "warning", "note")
    assert cli("manifest", good, "-o", tmp_path / "good.json").code == 0
    ran = cli("verify", swapped, "--expect", tmp_path / "good.json")
    assert ran.code == 1 and ran.having("FS308", tensor="1"), ran.out
    ran = cli("diff", good, swapped)
    assert ran.code == 1 and ran.having("FS309"), ran.out
    assert all("expert" in f["tensor"] or "moe_block" in f["tensor"] for f in ran.errors)


# One form


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_becomes_the_same_model(container: str, tmp_path: Path) -> None:
    folder = CONTAINERS[container](expert_damages.good(), tmp_path / "run")
    config = FUSED(expert_damages.good(), tmp_path / "good") / "config.json"
    ran = cli("convert", folder, tmp_path / "out", "--to", "hf", "--vocab-size", "250", "--config", config)
    assert ran.code == 0, ran.out
    have, want = read_result(tmp_path / "out"), expert_damages.take_apart(expert_damages.good())
    assert have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)


@pytest.mark.parametrize("other", ["hf_apart", "torchtitan", "maxtext"])
def test_experts_apart_equal_experts_in_one_tensor(other: str, tmp_path: Path) -> None:
    fused = FUSED(expert_damages.good(), tmp_path / "fused")
    apart = CONTAINERS[other](expert_damages.good(), tmp_path / "apart")
    for sides in ((fused, apart), (apart, fused)):
        ran = cli("diff", *sides)
        assert ran.code == 0 and not fastshard.diff(*sides), ran.out
    swapped = CONTAINERS[other](expert_damages.damage("swapped"), tmp_path / "swapped")
    ran = cli("diff", fused, swapped)
    assert ran.code == 1 and len(ran.errors) in (2, 6), ran.out
    assert all("model.layers.1.mlp.experts." in f["tensor"] for f in ran.errors)


def test_what_one_side_lacks_is_told_under_its_own_name(tmp_path: Path) -> None:
    fused = FUSED(expert_damages.good(), tmp_path / "fused")
    apart = APART(expert_damages.good(), tmp_path / "apart")
    lost = "model.layers.1.mlp.experts.3.down_proj.weight"
    edit_safetensors(apart / "model.safetensors", lambda tensors: tensors.pop(lost))
    ran = cli("diff", fused, apart)
    assert ran.code != 0, ran.out


# How they are compared


def test_names_are_taken_apart() -> None:
    def parts(name: str, dimensions: int = 2) -> tuple[str, int | None, int | None] | None:
        found = expert_values._take_apart(name, dimensions)
        return found and (found.pattern, found.layer, found.expert)

    assert parts("model.layers.1.mlp.experts.3.w1.weight") == ("model.layers.#.mlp.experts.#.w1.weight", 1, 3)
    assert parts("a.layers_2.moe_block.wi_0", 3) == ("a.layers_#.moe_block.wi_0", 2, None)
    assert parts("decoder.layers.4.mlp.experts.linear_fc1.weight7") == (
        "decoder.layers.#.mlp.experts.linear_fc1.weight#",
        4,
        7,
    )
    assert parts("decoder.layers.4.mlp.experts.weight1", 3) == (
        "decoder.layers.#.mlp.experts.weight1",
        4,
        None,
    )
    assert parts("qwen3_moe.layers.1.mlp.experts.3.up") == ("qwen3_moe.layers.#.mlp.experts.#.up", 1, 3)
    for other in (
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.1.mlp.experts.gate_up_proj_bias",
        "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv",
        "exp_avg.layers.1.mlp.experts.3.up_proj.weight",
        "a.layers_2.moe_block.gate.kernel",
    ):
        assert parts(other) is None, other


def test_encoded_tensors_that_are_too_large_are_said_to_be_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CONTAINERS["maxtext"](expert_damages.damage("copied"), tmp_path / "run")
    monkeypatch.setattr(expert_values, "_DECODED", 1 << 10)
    ran = cli("verify", folder)
    assert not odd(ran, "warning") and "too large to be decoded again" in ran.out
    plain = FUSED(expert_damages.damage("copied"), tmp_path / "fused")
    assert told(cli("verify", plain))


def test_more_files_than_may_be_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_values, "_OPEN", 1)
    state = expert_damages.take_apart(expert_damages.damage("copied_across"))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(expert_damages.config()))
    files = {f"model-{n:05d}-of-00003.safetensors": n - 1 for n in (1, 2, 3)}
    for file, rest in files.items():
        save_file({name: t for i, (name, t) in enumerate(state.items()) if i % 3 == rest}, folder / file)
    ran = cli("verify", folder)
    assert ran.code == 0 and [text for text in told(ran) if text.startswith("expert 5 of layer 2")], ran.out
