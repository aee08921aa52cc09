"""Universal checkpoints, and models that are tuned in part: what is frozen, and what has several names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
import zero_maker as maker
from helpers import assert_refused, cli, flip_payload, read_result
from transformers import AutoModelForCausalLM
from zero_maker import Run, Tensors, model_file, optim_file


def adapters(stage: int, world: int = 2, **more: object) -> Run:
    """Adapters beside a frozen base whose head is its embedding."""
    trained = {f"layers.{i}.lora_{ab}.weight": torch.rand(3, 5) for i in range(2) for ab in "AB"}
    frozen = {"embed.weight": torch.rand(7, 5).bfloat16(), "layers.0.weight": torch.rand(5, 5).bfloat16()}
    aliases = {"lm_head.weight": "embed.weight", "layers.9.lora_A.weight": "layers.0.lora_A.weight"}
    buffers = {"seen": torch.arange(4)}
    return Run(stage, world, torch.bfloat16, [trained], frozen, buffers, aliases, **more)


def frozen_under_all_names(run: Run) -> Tensors:
    """Frozen parameters are trained nowhere: under each name they are as stored."""
    aliases = {a: run.frozen[o] for a, o in run.aliases.items() if o in run.frozen}
    return run.frozen | aliases


def written(root: Path, run: Run, make: object = maker.write) -> Path:
    """The checkpoint, where aliases may be of frozen parameters."""
    trained = {a: o for a, o in run.aliases.items() if o in run.trained}
    tied = {a: o for a, o in run.aliases.items() if o in run.frozen}
    run.aliases = trained
    if run.stage != 3:
        run.frozen |= {a: run.frozen[o] for a, o in tied.items()}
    make(root, run)  # type: ignore[operator]
    run.aliases = trained | tied
    if run.stage != 3:
        run.frozen = {n: t for n, t in run.frozen.items() if n not in tied}
    for dp in range(run.world) if run.stage == 3 else (None,):

        def share(content: dict, dp: int | None = dp) -> None:
            if run.stage == 3:
                content["module"] |= {a: torch.zeros(0).bfloat16() for a in tied}
            if not dp:
                content["shared_params"] = dict(run.aliases)

        maker.edit(root / model_file(dp), share)
    return root


def assert_same(have: Tensors, wanted: Tensors) -> None:
    assert set(have) == set(wanted)
    for name, tensor in wanted.items():
        assert (have[name].dtype, have[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(have[name], tensor), name


def test_zero3_keeps_all_names_of_a_frozen_parameter(tmp_path: Path) -> None:
    run = adapters(3)
    root = written(tmp_path / "ckpt", run)
    ran = cli("merge", root, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    wanted = run.with_aliases(run.trained | run.frozen) | run.buffers | run.moments()
    assert_same(read_result(tmp_path / "out"), wanted)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_universal_zero3_is_whole(tmp_path: Path, world: int) -> None:
    run = adapters(3, world)
    root = written(tmp_path / "ckpt", run, maker.universal)
    ran = cli("merge", root, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    wanted = run.with_aliases(run.trained | run.frozen) | run.buffers | run.moments()
    assert_same(read_result(tmp_path / "out"), wanted)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("told", [True, False])
def test_another_name_is_the_fp32_of_its_owner(tmp_path: Path, stage: int, told: bool) -> None:
    run = adapters(stage)
    root = written(tmp_path / "ckpt", run, maker.universal)
    if not told:
        # Before DeepSpeed 0.8 the places of the tensors tell.
        maker.edit(root / model_file(), lambda content: content.update(shared_params=None))
    ran = cli("merge", root, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    # What is not trained is there as ds_to_universal widened it.
    others = {name: tensor.float() for name, tensor in frozen_under_all_names(run).items()} | run.buffers
    have = read_result(tmp_path / "out")
    assert_same(have, run.with_aliases(run.trained | run.frozen) | others | run.moments())


@pytest.mark.parametrize("lost", ["all", 1])
def test_universal_zero3_without_its_model_files_is_refused(tmp_path: Path, lost: object) -> None:
    root = written(tmp_path / "ckpt", adapters(3), maker.universal)
    for dp in range(2) if lost == "all" else (1,):
        (root / model_file(dp)).unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file=model_file(0 if lost == "all" else 1))


def test_universal_zero3_without_frozen_parameters_needs_one_model_file(tmp_path: Path) -> None:
    run = Run(3, 2, torch.bfloat16, [{"a.weight": torch.rand(3, 5)}])
    root = maker.universal(tmp_path / "ckpt", run)
    (root / model_file(1)).unlink()
    assert cli("merge", root, tmp_path / "out").code == 0
    assert_same(read_result(tmp_path / "out"), run.trained)


# -- models of Hugging Face ---------------------------------------------------------------------------


def llama(stage: int | str, folder: Path, name: str = "llama_tied") -> tuple[Run, torch.nn.Module]:
    """The last two layers are tuned; the embedding, which is the head too, is not."""
    model = tiny_models.model(name, folder).float()
    tensors = {n: t.detach() for n, t in model.named_parameters()}
    trained = {n: t for n, t in tensors.items() if n.startswith(("model.layers.2.", "model.layers.3."))}
    frozen = {n: t.bfloat16() for n, t in tensors.items() if n not in trained}
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if name.endswith("tied") else {}
    return Run(stage, 2, torch.bfloat16, [trained], frozen, aliases=aliases), model


# Without names, nothing tells which of a model's equal layers an optimizer of whole tensors steps.
@pytest.mark.parametrize("stage", ["fused", 1, 3])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_moments_of_a_model_that_is_tuned_in_part(tmp_path: Path, stage: int | str, name: str) -> None:
    run, _ = llama(stage, tmp_path / "hf", name)
    root = written(tmp_path / "ckpt", run)
    shutil.copy(tmp_path / "hf/config.json", root / "config.json")
    ran = cli("merge", root, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    have = {n: t for n, t in read_result(tmp_path / "out").items() if ".exp_avg" in n}
    assert_same(have, run.moments())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("gpt_neox", "lm_head", "embed_out"),
        ("gpt_neox", "embed_out", "lm_head"),
        ("mixtral", ".mlp.", ".block_sparse_moe."),
        ("mixtral", ".block_sparse_moe.", ".mlp."),
    ],
)
def test_any_spelling_of_what_is_frozen_is_known(
    tmp_path: Path, stage: int, name: str, old: str, new: str
) -> None:
    """A layout knows some tensors by two names, of which a frozen one has one or the other."""
    model = tiny_models.model(name, tmp_path / "hf").float()
    tensors = {n.replace(old, new): t.detach() for n, t in model.named_parameters()}
    assert any(new in n for n in tensors)
    trained = {n: t for n, t in tensors.items() if "norm" in n and ".1." in n}
    frozen = {n: t.bfloat16() for n, t in tensors.items() if n not in trained}
    run = Run(stage, 2, torch.bfloat16, [trained], frozen)
    root = written(tmp_path / "ckpt", run)
    shutil.copy(tmp_path / "hf/config.json", root / "config.json")
    ran = cli("merge", root, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    have = {n: t for n, t in read_result(tmp_path / "out").items() if ".exp_avg" in n}
    assert_same(have, run.moments())


def test_a_moment_that_is_lost_is_missed(tmp_path: Path) -> None:
    run, _ = llama("plain", tmp_path / "hf", "llama")
    run.groups, run.frozen = [run.trained | {n: t.float() for n, t in run.frozen.items()}], {}
    root = written(tmp_path / "ckpt", run)
    shutil.copy(tmp_path / "hf/config.json", root / "config.json")
    maker.edit(root / model_file(), lambda content: content["optimizer"]["state"][2].pop("exp_avg"))
    missed = list(run.trained)[2]
    ran = cli("merge", root, tmp_path / "out", "--optimizer")
    assert (ran.code, (tmp_path / "out").exists()) == (3, False), ran.out
    assert ran.having("FS102", severity="error", tensor=missed)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("beside", ["", maker.TAG])
def test_a_universal_checkpoint_of_a_known_model_is_converted(
    tmp_path: Path, stage: int, name: str, beside: str
) -> None:
    run, model = llama(stage, tmp_path / "hf", name)
    root = written(tmp_path / "ckpt", run, maker.universal)
    shutil.copy(tmp_path / "hf/config.json", root / beside / "config.json")
    ran = cli("convert", root, tmp_path / "out", "--to", "hf", "--dtype", "f32")
    assert ran.code == 0, ran.out
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name in run.frozen:
                parameter.copy_(run.frozen[parameter_name].float())
        tokens = torch.arange(12).view(1, -1)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


# -- an optimizer's file that is damaged, where the parameters are asked for ----------------------------


@pytest.mark.parametrize("stage", [1, 2, "bf16"])
def test_parameters_are_taken_beside_a_damaged_optimizer_file(tmp_path: Path, stage: int | str) -> None:
    run = Run(stage, 2, torch.bfloat16, [{"a.weight": torch.rand(9, 5), "b.weight": torch.rand(8)}])
    root = maker.write(tmp_path / "ckpt", run)
    state = maker.load(root / optim_file(1))["optimizer_state_dict"]
    flip_payload(root / optim_file(1), state["single_partition_of_fp32_groups"][0])
    ran = cli("merge", root, tmp_path / "out", "--weights", "params")
    assert ran.code == 0, ran.out
    assert ran.having("FS301", severity="warning", file=optim_file(1))
    assert_same(read_result(tmp_path / "out"), run.params())
    assert_refused(root, tmp_path / "masters", "FS301", file=optim_file(1))
