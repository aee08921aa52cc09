"""Names of files that count to anything, lists where names should be, links that lead in circles: bounded
work, one finding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fastshard
import pytest
import torch
from helpers import FIXTURES, HF, TP4, assert_refused, cli, copy
from holding import HANG
from safetensors.torch import save_file

#: Address space of a run: what would count through a name's number takes more.
LIMIT = 4 << 30


def bounded(*argv: object) -> tuple[int, str]:
    """Exit code and findings of a run with little memory and little time."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (20, 20));"
        f"resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}));"
        "from fastshard.cli.main import main; raise SystemExit(main())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert "Traceback" not in ran.stderr, ran.stderr[-2000:]
    return ran.returncode, ran.stderr


HUGE = [
    "shard-33334-model-33332-of-33332.safetensors",
    "shard-00001-model-00001-of-99999.safetensors",
    "tp_rank_65000.safetensors",
    "tp_rank_99999999.safetensors",
    "tp_rank_99999999999999999999999999.safetensors",
    "model-00001-of-99999.safetensors",
    "model-00001-of-99999999999999999999999.safetensors",
    "model-stage-99999999-shard-00001.safetensors",
    "mp_rank_99999999999999999999999_model_states.pt",
    "mp_rank_65000_model_states.pt",
    "zero_pp_rank_99999999999999999999999_mp_rank_00_model_states.pt",
    "layer_99999999999999999999999-model_00-model_states.pt",
    "layer_00-model_99999999999999999999999-model_states.pt",
    "iter_0000001/mp_rank_99999999999999999999999/model_optim_rng.pt",
]


@pytest.mark.parametrize("name", HUGE)
def test_a_name_that_counts_far_costs_little(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run/global_step1" / name
    file.parent.mkdir(parents=True)
    if name.endswith(".pt"):
        torch.save({"module": {"a": torch.ones(4)}, "mp_world_size": 1 << 19, "dp_world_size": 1 << 19}, file)
    else:
        save_file({"a": torch.ones(4)}, file, {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [0]}}'})
    code, said = bounded("merge", tmp_path / "run", tmp_path / "out")
    assert code in (0, 1, 2, 3) and len(said.splitlines()) < 100, said
    assert code or not name.endswith(".safetensors")
    assert "FS520" not in said, said


def test_runs_of_missing_files_are_ranges(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    for number in (1, 3, 5000):
        save_file({f"a{number}": torch.ones(4)}, tmp_path / f"ckpt/model-{number:05d}-of-09000.safetensors")
    ran = assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS101", exit=3)
    told = [(f["file"], f["message"]) for f in ran.having("FS101")]
    assert told == [
        ("model-00002-of-09000.safetensors", "the file is missing"),
        (
            "model-00004-of-09000.safetensors",
            "the files from this one to model-04999-of-09000.safetensors are missing",
        ),
        (
            "model-05001-of-09000.safetensors",
            "the files from this one to model-09000-of-09000.safetensors are missing",
        ),
    ]


@pytest.mark.parametrize("value", [["model.safetensors"], {"a": 1}, None, 3, True])
def test_an_index_that_names_no_file(value: object, tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    index = root / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = value
    index.write_text(json.dumps(content))
    assert_refused(root, tmp_path / "out", "FS211", exit=2, file="index.json")


def test_links_that_lead_in_circles(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")
    (root / "notes").symlink_to(root / "others")
    (root / "others").symlink_to(root / "notes")
    assert cli("merge", root, tmp_path / "out").code == 0
    (root / "extra.safetensors").symlink_to(root / "extra.safetensors")
    ran = cli("merge", root, tmp_path / "not")
    assert ran.code == 3 and ran.having("FS101", file="extra.safetensors", message="cannot be read")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    ran = cli("inspect", loop)
    assert ran.code == 2 and ran.errors


def test_few_descriptors_for_many_files(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    for number in range(1, 301):
        save_file({f"a{number}": torch.ones(4)}, tmp_path / f"ckpt/model-{number:05d}-of-00300.safetensors")
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128));"
        "from fastshard.cli.main import main; raise SystemExit(main())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, "merge", tmp_path / "ckpt", tmp_path / "out", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    found = [f["code"] for f in json.loads(ran.stdout)["findings"] if f["severity"] == "error"]
    assert (ran.returncode, found) in [(0, []), (2, ["FS511"])]


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda p: fastshard.open(p, vocabsize=3), "vocab_size"),
        (lambda p: fastshard.plan(p, vocabsize=3), "vocab_size"),
        (lambda p: fastshard.merge(p, "x", overwite=True), "overwrite"),
        (lambda p: fastshard.convert(p, "x", "hf", max_shards_size=3), "max_shard_size"),
        (lambda p: fastshard.verify(p, stp=3), "step"),
        (lambda p: fastshard.stats(p, confg="x"), "config"),
        (lambda p: fastshard.diff(p, p, layuot="x"), "layout"),
        (lambda p: fastshard.plan(fastshard.open(p), dtpye="bf16"), "dtype"),
    ],
)
def test_an_option_that_nobody_knows_is_a_type_error(call: object, near: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean {near}?"):
        call(FIXTURES / "sharded/hf_sharded")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (("mrege", HF, "out"), "merge"),
        (("merge", HF, "out", "--vocabsize", "3"), "--vocab-size"),
        (("convert", HF, "out", "--to", "hff"), "hf"),
        (("convert", HF, "out", "--to", "hg"), "hf"),
        (("convert", HF, "out", "--to", "megatron:torchdist"), "megatron:torch_dist"),
        (("merge", HF, "out", "--dtype", "bf61"), "bf16"),
    ],
)
def test_near_words_are_suggested(argv: tuple[object, ...], near: str) -> None:
    for json_output in (True, False):
        ran = cli(*argv, json_output=json_output)
        assert ran.code == 2 and f"did you mean {near}?" in ran.out + ran.err


def test_a_tensor_s_name_is_suggested() -> None:
    with pytest.raises(KeyError, match=r"did you mean model\.norm\.weight"):
        fastshard.open(HF)["model.norm.wieght"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("adapter_model.safetensors", "PEFT"),
        ("m.Q4_K_M.gguf", "GGUF"),
        ("consolidated.00.pth", "Meta"),
        ("flax_model.msgpack", "Flax"),
        ("step.ckpt", "a trainer saved"),
        ("x.nemo", "NeMo"),
        ("w.npz", "script"),
    ],
)
def test_formats_that_are_not_read_are_named(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / name).write_bytes(b"x")
    ran = cli("inspect", tmp_path / "ckpt")
    assert ran.code == 2 and told in ran.out


def test_an_address_is_no_path() -> None:
    address = "s3://bucket/run"
    commands = (
        ("steps", address, "--follow"),
        ("check-storage", address),
        ("merge", HF, "https://host/out"),
        ("merge", "qq://b/run", "out"),
    )
    for argv in commands:
        assert cli(*argv).having("FS514"), argv


def test_quiet_says_errors_only(tmp_path: Path) -> None:
    for argv in (
        ("merge", HF, tmp_path / "out"),
        ("verify", HF),
        ("convert", HF, tmp_path / "hf", "--to", "hf"),
    ):
        ran = cli(*argv, "-q", json_output=False)
        assert (ran.code, ran.out, ran.err) == (0, "", ""), argv
    ran = cli("merge", tmp_path / "nowhere", tmp_path / "not", "-q", json_output=False)
    assert ran.code == 2 and not ran.out and "FS501" in ran.err
    assert "tensors" in cli("inspect", HF, "-q", json_output=False).out


@pytest.mark.parametrize(
    ("fixture", "old"),
    [
        ("sharded/colossalai_049_tp2_pp2", "modeling"),
        ("universal/zero1_bf16_dp2", "global_step4/zero/norm.bias"),
        ("orbax/paxml_gpt3_micro_weights", "checkpoints"),
        ("gpt_neox/neox_pp_tp2", "global_step4"),
    ],
)
def test_a_name_that_is_not_utf8(fixture: str, old: str, tmp_path: Path) -> None:
    root = copy(FIXTURES / fixture, tmp_path / "ckpt")
    (root / old).rename((root / old).with_name(os.fsdecode(b"a\xff")))
    for argv in (["inspect", root], ["merge", root, tmp_path / "out"]):
        ran = cli(*argv)
        assert ran.code and "FS520" not in ran.out and "Traceback" not in ran.err, ran.err[-500:]
        if "modeling" in old or "norm" in old:
            assert ran.having("FS514", file="a\\xff/", message="not UTF-8"), ran.findings
    above = copy(HF, tmp_path / os.fsdecode(b"b\xff"))
    assert cli("merge", above, tmp_path / "whole").code == 0


#: A name that is no text, as a part of others.
NO_TEXT = os.fsdecode(b"x\xff")


def test_code_of_a_model_under_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "m.Model"}}))
    (root / "m.py").write_text("")
    (root / f"{NO_TEXT}.py").write_text("")
    for command in (("merge",), ("convert", "--to", "hf")):
        assert_refused(
            root, tmp_path / "out", "FS514", exit=2, command=command, file="x\\xff.py", message="not UTF-8"
        )


def test_a_file_that_readers_load_under_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    (root / f"tokenizer{NO_TEXT}.json").write_text("{}")
    ran = cli("manifest", root)
    assert ran.code == 2 and ran.having("FS514", file="tokenizerx\\xff.json", message="not UTF-8")
    assert not (root / "fastshard.manifest.json").exists()
    # Nothing of that name goes along with a result.
    assert cli("merge", root, tmp_path / "out").code == 0


@pytest.mark.parametrize("options", [(), ("--drop-optimizer",)])
def test_a_stray_file_beside_a_step_under_a_name_that_is_not_utf8(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    root = copy(FIXTURES / "deepspeed/zero1_bf16_dp2", tmp_path / "ckpt")
    (root / "global_step4" / f"core.{NO_TEXT}").write_text("")
    (root / "global_step4" / NO_TEXT).mkdir()
    (root / "global_step4" / NO_TEXT / "latest").write_text("")
    ran = cli("master-weights", root, "--repair", tmp_path / "out", *options)
    assert ran.code == 0, ran.findings
    assert {f["file"] for f in ran.having("FS108", message="not copied")} == {
        "global_step4/core.x\\xff",
        "global_step4/x\\xff/latest",
    }
    assert cli("verify", tmp_path / "out").code == 0


def test_a_vocabulary_under_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / f"{NO_TEXT}.tiktoken"
    file.write_text("QQ== 0\n")
    ran = cli("merge", HF, tmp_path / "out", "--tokenizer", file)
    assert ran.code == 2 and ran.having("FS514", file="x\\xff.tiktoken", message="not UTF-8")
    # Above a checkpoint it may be anybody's.
    assert cli("merge", copy(HF, tmp_path / "ckpt"), tmp_path / "out").code == 0
