"""Output folders of trainers, given as they are: the right step and part are found, or it is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_folders
from helpers import at_once, cli, copy, read_result
from safetensors.torch import save_file
from trainer_folders import LAYOUTS, NEW, OLD, Weights, write_dcp

#: Layouts of which one model is certain, and the name of the step that is taken; None for the folder itself.
FOUND = {
    "verl_fsdp": "global_step_20",
    "verl_fsdp_hf": "global_step_20",
    "verl_sft": "global_step_20",
    "verl_megatron_hf": "global_step_20",
    "verl_megatron_hf_v1": "global_step_20",
    "automodel_sharded": "epoch_0_step_20",
    "automodel_consolidated": "epoch_0_step_20",
    "automodel_dcp": "epoch_0_step_20",
    "automodel_peft": "epoch_0_step_20",
    "accelerate_plain": "checkpoint_1",
    "accelerate_fsdp": "checkpoint_1",
    "accelerate_fsdp_full": "checkpoint_1",
    "factory_running": "checkpoint-20",
    "factory_full": None,
    "factory_lora": None,
    "factory_lora_running": "checkpoint-20",
    "trainer_fsdp": "checkpoint-20",
    "axolotl_prepared": "checkpoint-20",
    "axolotl_fsdp": "checkpoint-20",
}
#: Layouts with several models, the names by which each is chosen, and of which step.
SEVERAL = {
    "verl_fsdp_critic": ("actor", "critic"),
    "accelerate_fsdp_two": ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"),
    "axolotl_lora_merged": ("merged", "."),
}
#: Layouts that hold a config and a tokenizer of the model.
WITH_COMPANIONS = {
    name
    for name in FOUND
    if not name.startswith("accelerate")
    and "lora" not in name
    and name not in ("automodel_dcp", "automodel_peft")
}
#: Those whose twins are tried with every run of the tests.
QUICK = ("verl_megatron_hf", "automodel_dcp", "automodel_peft", "factory_running", "factory_lora")

Made = Callable[[str], tuple[Path, Weights]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run's folder by the layout's name, and the tensors of its model; not to be changed."""
    folder = tmp_path_factory.mktemp("trainers")
    known: dict[str, tuple[Path, Weights]] = {}

    def make(name: str) -> tuple[Path, Weights]:
        if name not in known:
            known[name] = folder / name, LAYOUTS[name](folder / name)
        return known[name]

    return make


def same(have: Weights, want: Weights) -> bool:
    """Tensors are equal by name; accelerate puts the model below a key, which merges without config keep."""
    if not set(have) & set(want):
        have = {name.removeprefix("model."): tensor for name, tensor in have.items()}
    return set(have) == set(want) and all(torch.equal(have[name], want[name]) for name in want)


def newest_of(run: Path, step: str | None) -> Path:
    """The folder of the step that is taken."""
    return run if step is None else next(path for path in run.rglob(step) if not path.is_symlink())


def copy_run(run: Path, target: Path) -> Path:
    shutil.copytree(run, target, symlinks=True)
    return target


@pytest.mark.parametrize("name", FOUND)
def test_the_run_and_its_step_are_read_as_they_are(name: str, made: Made, tmp_path: Path) -> None:
    run, want = made(name)
    ran = cli("inspect", run)
    assert ran.code == 0 and ran.doc["complete"], ran.out
    assert ran.doc["step"] == FOUND[name]
    assert not [f for f in ran.findings if f["severity"] != "note"], ran.findings
    assert cli("verify", run).code == 0
    for n, ckpt in enumerate({run, newest_of(run, FOUND[name])}):
        out = tmp_path / f"out{n}"
        assert cli("merge", ckpt, out).code == 0
        assert same(read_result(out), want)
    steps = cli("steps", run)
    assert steps.code == 0 and [s["verdict"] for s in steps.doc["steps"]] == ["complete"] * 2, steps.out


@pytest.mark.parametrize("name", FOUND)
def test_it_becomes_a_model_with_its_companions_or_says_what_to_pass(
    name: str, made: Made, tmp_path: Path
) -> None:
    run, want = made(name)
    for n, ckpt in enumerate({run, newest_of(run, FOUND[name])}):
        out = tmp_path / f"out{n}"
        ran = cli("convert", ckpt, out, "--to", "hf")
        if name in WITH_COMPANIONS:
            assert ran.code == 0 and same(read_result(out), want), ran.out
            assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {
                p.name for p in out.iterdir()
            }
            continue
        assert ran.code == 2 and not out.exists()
        if "lora" in name or "peft" in name:
            assert "merge BASE OUT --adapter DIR" in ran.errors[0]["message"]
            continue
        assert any("--config FILE" in command for command in ran.errors[0]["run"])
        trainer_folders.config().save_pretrained(tmp_path / "config")
        config = ("--config", tmp_path / "config/config.json")
        assert cli("convert", ckpt, out, "--to", "hf", *config).code == 0
        assert same(read_result(out), want)


@pytest.mark.parametrize("name", FOUND)
def test_an_older_step_is_chosen_by_its_number(name: str, made: Made, tmp_path: Path) -> None:
    run, want = made(name)
    number = "0" if name.startswith("accelerate") else str(OLD)
    ran = cli("merge", run, tmp_path / "out", "--step", number)
    assert ran.code == 0, ran.out
    assert not same(read_result(tmp_path / "out"), want)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_models_are_refused_with_the_commands_that_choose(
    name: str, made: Made, tmp_path: Path
) -> None:
    run, want = made(name)
    for verb in ("inspect", "verify", "merge", "convert"):
        out = tmp_path / "refused"
        ran = cli(verb, run, *{"merge": [out], "convert": [out, "--to", "hf"]}.get(verb, []))
        (error,) = ran.errors
        assert ran.code == 2 and error["code"] == "FS106" and not out.exists()
        ends = [command.rpartition(" --step ")[2] for command in error["run"]]
        assert ends == list(SEVERAL[name])
    results = []
    for choice in SEVERAL[name]:
        out = tmp_path / f"out{choice}"
        ran = cli("merge", run, out, "--step", choice)
        assert ran.code == 0, ran.out
        results.append(read_result(out))
    assert same(results[0], want) and not same(results[1], want)
    steps = cli("steps", run)
    assert steps.code == 0 and [s["verdict"] for s in steps.doc["steps"]] == ["complete"] * 2, steps.out


def test_a_step_and_a_model_are_chosen_together(made: Made, tmp_path: Path) -> None:
    run, _ = made("verl_fsdp_critic")
    for choice, want in (
        ("global_step_10/actor", trainer_folders.weights(OLD)),
        ("10/critic", trainer_folders.value_weights(OLD)),
        ("critic", trainer_folders.value_weights(NEW)),
    ):
        out = tmp_path / choice.replace("/", "-")
        assert cli("merge", run, out, "--step", choice).code == 0
        assert same(read_result(out), want)
    ran = cli("inspect", run, "--step", "10")
    assert ran.code == 2 and ran.errors[0]["run"][1].endswith("--step 10/critic")


def test_a_damaged_critic_is_the_steps_verdict(made: Made, tmp_path: Path) -> None:
    run = copy_run(made("verl_fsdp_critic")[0], tmp_path / "run")
    (run / "global_step_20/critic/model_world_size_2_rank_1.pt").unlink()
    ran = cli("steps", run)
    assert ran.code == 3 and [s["verdict"] for s in ran.doc["steps"]] == ["complete", "incomplete"]


def test_models_in_numbered_files_are_given_by_file(made: Made, tmp_path: Path) -> None:
    """accelerate's second model is `model_1.safetensors`."""
    run, want = made("accelerate_two_models")
    ran = cli("merge", run, tmp_path / "out")
    (error,) = ran.errors
    assert ran.code == 2 and error["code"] == "FS106" and not (tmp_path / "out").exists()
    assert error["got"] == "model.safetensors, model_1.safetensors"
    results = []
    for n, command in enumerate(error["run"]):
        out = tmp_path / f"out{n}"
        assert cli("merge", command.split()[-1], out).code == 0
        results.append(read_result(out))
    assert same(results[0], want) and not same(results[1], want)
    assert [s["verdict"] for s in cli("steps", run).doc["steps"]] == ["complete"] * 2
    # A config says whose the folder is.
    own = copy(newest_of(run, "checkpoint_1"), tmp_path / "own")
    trainer_folders.config().save_pretrained(own)
    ran = cli("merge", own, tmp_path / "one")
    assert ran.code == 0 and ran.having("FS108", file="model_1.safetensors", severity="warning"), ran.out
    assert same(read_result(tmp_path / "one"), want)


@pytest.mark.parametrize("name", at_once(list(FOUND), QUICK))
def test_a_file_that_is_gone_changes_no_result(name: str, made: Made, tmp_path: Path) -> None:
    """Each file of a run is taken away once: it is refused, or the result is the same."""
    source, want = made(name)
    run = copy_run(source, tmp_path / "run")
    refused = 0
    for path in sorted(p for p in run.rglob("*") if p.is_file() and "LATEST" not in p.parts):
        if path.is_symlink() or any(part.is_symlink() for part in path.parents):
            continue
        kept = path.read_bytes()
        path.unlink()
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        ran = cli("merge", run, out)
        if ran.code:
            refused += 1
            assert not out.exists() and ran.errors, path
        else:
            assert same(read_result(out), want), path
        path.write_bytes(kept)
    assert refused


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("factory_full", "model.safetensors"),
        ("factory_lora", "adapter_model.safetensors"),
        ("factory_lora", "adapter_config.json"),
    ],
)
def test_a_final_model_that_is_gone_is_not_its_newest_step(
    name: str, lost: str, made: Made, tmp_path: Path
) -> None:
    """What the Trainer writes with the final model shows that there was one."""
    run = copy_run(made(name)[0], tmp_path / "run")
    (run / lost).unlink()
    for verb in (("merge", run, tmp_path / "out"), ("inspect", run), ("verify", run)):
        ran = cli(*verb)
        (error,) = ran.errors
        assert ran.code == 3 and error["code"] == "FS101" and "checkpoint-20" in error["got"], ran.out
        assert error["run"][0].endswith("--step checkpoint-20")
    assert not (tmp_path / "out").exists()
    step = read_result(made(name)[0] / f"checkpoint-{NEW}") if "full" in name else None
    for n, choice in enumerate((("--step", "checkpoint-20"), ("--accept", "older-step"))):
        ran = cli("merge", run, tmp_path / f"out{n}", *choice)
        assert ran.code == 0 and bool(ran.having("FS101", severity="warning")) == (n == 1), ran.out
        assert step is None or same(read_result(tmp_path / f"out{n}"), step)
    # Before the run ends, there is none of this: axolotl has its config and adapter_config.json.
    for file in ("training_args.bin", "adapter_model.safetensors"):
        (run / file).unlink(missing_ok=True)
    assert cli("merge", run, tmp_path / "running").code == 0


@pytest.mark.parametrize("name", ["verl_fsdp", "verl_sft", "verl_megatron_hf", "verl_megatron_hf_v1"])
def test_a_tracker_that_names_a_step_which_is_gone_is_refused(name: str, made: Made, tmp_path: Path) -> None:
    run = copy_run(made(name)[0], tmp_path / "run")
    (run / "latest_checkpointed_iteration.txt").write_text("30")
    ran = cli("merge", run, tmp_path / "out")
    assert ran.code == 3 and ran.errors[0]["code"] == "FS105" and not (tmp_path / "out").exists(), ran.out
    ran = cli("merge", run, tmp_path / "out", "--accept", "older-step")
    assert ran.code == 0 and same(read_result(tmp_path / "out"), made(name)[1])


@pytest.mark.parametrize(
    "name", ["automodel_sharded", "automodel_consolidated", "automodel_dcp", "automodel_peft"]
)
def test_a_link_beside_the_steps_names_the_last_one(name: str, made: Made, tmp_path: Path) -> None:
    """Automodel points LATEST at a step when its save is over; wherever the run was moved."""
    run = copy_run(made(name)[0], tmp_path / "run")
    link = run / "LATEST"
    for target in (f"epoch_0_step_{OLD}", f"/elsewhere/run/epoch_0_step_{OLD}"):
        link.unlink()
        link.symlink_to(target)
        ran = cli("inspect", run)
        assert ran.code == 0 and ran.doc["step"] == f"epoch_0_step_{OLD}", ran.out
        assert ran.having("FS104", file=f"epoch_0_step_{NEW}", severity="warning")
    link.unlink()
    link.symlink_to("epoch_0_step_30")
    ran = cli("inspect", run)
    assert ran.code == 3 and ran.errors[0]["code"] == "FS105" and ran.errors[0]["file"] == "LATEST", ran.out
    link.unlink()
    link.symlink_to("../another-run")
    assert cli("inspect", run).doc["step"] == f"epoch_0_step_{NEW}"


@pytest.mark.parametrize("name", [name for name, step in FOUND.items() if step is not None])
def test_a_newest_step_of_which_the_model_is_gone_is_not_its_optimizer(
    name: str, made: Made, tmp_path: Path
) -> None:
    """The save was cut off: what is there of the step is the state of the run."""
    run = copy_run(made(name)[0], tmp_path / "run")
    step = FOUND[name]
    assert step is not None
    folder = newest_of(run, step)
    words = ("model", "adapter", "shard-", "pytorch_model")
    below = ("model", "pytorch_model_fsdp_0", "huggingface")
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        inside = path.relative_to(folder).parts
        if path.name.startswith(words) or set(inside[:-1]) & set(below):
            path.unlink()
    for ckpt in (run, folder):
        ran = cli("merge", ckpt, tmp_path / "out")
        assert ran.code and ran.errors and not (tmp_path / "out").exists(), ran.out
    assert (
        cli("merge", run, tmp_path / "out", "--step", str(OLD if "accelerate" not in name else 0)).code == 0
    )


def test_state_alone_is_read_where_it_is_given(made: Made, tmp_path: Path) -> None:
    run = copy_run(made("automodel_dcp")[0], tmp_path / "run")
    for step in (OLD, NEW):
        shutil.rmtree(run / f"epoch_0_step_{step}/model")
    ran = cli("inspect", run)
    (error,) = ran.errors
    assert ran.code == 3 and error["code"] == "FS101" and error["file"] == f"epoch_0_step_{NEW}/optim"
    assert cli("inspect", run / f"epoch_0_step_{NEW}/optim").code == 0


def test_a_folder_with_the_name_of_state_may_hold_the_model(tmp_path: Path) -> None:
    want = trainer_folders.weights(1)
    write_dcp(tmp_path / "run/step_1/extra", dict(want))
    assert cli("merge", tmp_path / "run", tmp_path / "out").code == 0
    assert same(read_result(tmp_path / "out"), want)


@pytest.mark.parametrize("write", [write_dcp, trainer_folders.write_model], ids=["dcp", "hf"])
@pytest.mark.parametrize("step", ["", "step_1/"])
def test_a_model_in_a_folder_with_the_name_of_state_is_not_passed_over(
    step: str, write: Callable[[Path, Weights], None], tmp_path: Path
) -> None:
    """Beside another model either may be meant; each is read when it is chosen."""
    run = tmp_path / "run"
    models = {name: trainer_folders.weights(seed) for seed, name in enumerate(("base", "extra"))}
    for name, tensors in models.items():
        write(run / f"{step}{name}", dict(tensors))
    ran = cli("merge", run, tmp_path / "out")
    assert ran.code == 2 and ran.errors[0]["code"] == "FS106", ran.out
    for name, tensors in models.items():
        assert cli("merge", run, tmp_path / name, "--step", name).code == 0
        assert same(read_result(tmp_path / name), tensors)


def test_a_tracker_above_the_final_model_is_told_by_what_is_taken(tmp_path: Path) -> None:
    """The step that it names can be read, and is not called unusable."""
    run = tmp_path / "run"
    trainer_folders.write_model(run, trainer_folders.weights(0))
    trainer_folders.write_model(run / "checkpoint-20", trainer_folders.weights(1))
    trainer_folders.write_text(run / "latest", "checkpoint-20")
    ran = cli("merge", run, tmp_path / "out")
    (found,) = ran.having("FS104", severity="warning")
    assert ran.code == 0 and found["got"] == "'checkpoint-20'" and not found.get("expected"), ran.out
    assert "itself is used" in found["message"]
    assert same(read_result(tmp_path / "out"), trainer_folders.weights(0))
    assert cli("merge", run, tmp_path / "step", "--step", "checkpoint-20").code == 0
    assert same(read_result(tmp_path / "step"), trainer_folders.weights(1))


def test_rank_files_of_two_models_are_no_one_model(tmp_path: Path) -> None:
    """accelerate without DCP: the index is in the files' names."""
    for model in range(2):
        for rank in range(2):
            state = trainer_folders.weights(model)
            trainer_folders.write_torch(tmp_path / f"run/pytorch_model_fsdp_{model}_rank{rank}.bin", state)
    ran = cli("merge", tmp_path / "run", tmp_path / "out")
    assert ran.code == 2 and ran.errors[0]["code"] == "FS106", ran.out
    assert ran.errors[0]["got"] == "pytorch_model_fsdp_0_rank*, pytorch_model_fsdp_1_rank*"


def test_a_newer_step_of_another_framework_is_not_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    dcp.save({"model": {"w.weight": torch.ones(4)}}, checkpoint_id=run / "global_step_100", no_dist=True)
    (run / "checkpoint-200").mkdir()
    save_file({"w.weight": torch.ones(4)}, run / "checkpoint-200/model.safetensors", {"format": "pt"})
    ran = cli("merge", run, tmp_path / "out")
    assert ran.code == 2 and ran.having("FS106", file="checkpoint-200", severity="error"), ran.out
    assert not (tmp_path / "out").exists()
    assert cli("merge", run, tmp_path / "out", "--step", "global_step_100").code == 0
    # One that is older, and epochs, which count something else, say nothing.
    (run / "checkpoint-200").rename(run / "checkpoint-50")
    assert cli("merge", run, tmp_path / "older").code == 0
    (run / "checkpoint-50").rename(run / "epoch_500")
    assert cli("merge", run, tmp_path / "epochs").code == 0
