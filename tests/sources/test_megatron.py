"""Megatron-LM: legacy and torch_dist checkpoints of one model give the tensors that they must."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fastshard.common.listing import File
from fastshard.layouts.declaration import Source
from fastshard.sources.base import Found
from fastshard.sources.megatron import of_ranks
from helpers import FIXTURES, assert_refused, cli, copy, edit_pt, read_result, sha256
from transformers import AutoModelForCausalLM

SHARDED = FIXTURES / "sharded"
LEGACY = SHARDED / "megatron_legacy_tp2_pp2"
DIST = SHARDED / "megatron_torch_dist_tp2_pp2"
BOTH = [pytest.param(LEGACY, id="legacy"), pytest.param(DIST, id="torch_dist")]


def hashes(out: Path) -> dict[str, str]:
    return {name: sha256(tensor) for name, tensor in read_result(out).items()}


def expected(folder: Path, name: str) -> dict[str, str]:
    return {n: t["sha256"] for n, t in json.loads((folder / name).read_text())["tensors"].items()}


def rank_file(tp: int, pp: int) -> str:
    return f"iter_0000010/mp_rank_{tp:02d}_{pp:03d}/model_optim_rng.pt"


@pytest.mark.parametrize("folder", BOTH)
def test_own_names_are_merged(folder: Path, tmp_path: Path) -> None:
    assert cli("verify", folder).code == 0
    assert cli("merge", folder, tmp_path / "out").code == 0
    assert hashes(tmp_path / "out") == expected(folder, "expected.json")


@pytest.mark.parametrize("folder", BOTH)
def test_hugging_face_tensors_are_those_of_the_model(folder: Path, tmp_path: Path) -> None:
    ran = cli("convert", folder, tmp_path / "out", "--to", "hf", "--vocab-size", "1000")
    assert ran.code == 0, ran.out
    assert hashes(tmp_path / "out") == expected(folder, "expected_hf.json")


def test_the_result_computes_what_the_original_does(tmp_path: Path) -> None:
    assert cli("convert", DIST, tmp_path / "out", "--to", "hf", "--vocab-size", "1000").code == 0
    tokens = torch.arange(16).reshape(1, 16) * 31 % 1000
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(SHARDED / "hf_sharded", dtype=torch.float32)
    with torch.no_grad():
        difference = (ours(tokens).logits - theirs(tokens).logits).abs().max()
    # The fixture's arguments say neither eps nor base: Megatron's defaults, which are Llama's.
    assert difference < 2e-2


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    (root / rank_file(1, 1)).unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file="mp_rank_01_001", rank="tp 1, pp 1")


def test_a_copied_rank_is_named(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    (root / rank_file(1, 0)).write_bytes((root / rank_file(0, 0)).read_bytes())
    assert_refused(root, tmp_path / "out", "FS303", file="mp_rank_01_000")


def test_a_copied_stage_is_refused(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    for tp in range(2):
        (root / rank_file(tp, 1)).write_bytes((root / rank_file(tp, 0)).read_bytes())
    ran = cli("merge", root, tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) in ((1, False), (3, False))


def test_a_rank_of_another_iteration_is_named(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")

    def change(content: dict[str, Any]) -> None:
        content["iteration"] = 11

    edit_pt(root / rank_file(0, 1), change)
    assert_refused(root, tmp_path / "out", "FS107", rank="tp 0, pp 1", expected="10", got="11")


def ranked(folder: Path, rank_of: Any, **more: Any) -> Path:
    """The fixture with ranks in its arguments, as a run of dp 2 has them."""
    root = copy(LEGACY, folder)
    for tp, pp in itertools.product(range(2), range(2)):
        own = {"rank": rank_of(tp, pp), "world_size": 8, **more}
        edit_pt(root / rank_file(tp, pp), lambda content, own=own: vars(content["args"]).update(own))
    return root


#: Ranks of the first copies of the data: in the order tp-cp-ep-dp-pp, and in tp-cp-ep-pp-dp.
ORDERS = {"stages last": lambda tp, pp: tp + 4 * pp, "data last": lambda tp, pp: tp + 2 * pp}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "pair", itertools.combinations(itertools.product(range(2), range(2)), 2), ids=lambda pair: str(pair)
)
def test_swapped_files_contradict_their_own_arguments(pair: Any, order: str, tmp_path: Path) -> None:
    root = ranked(tmp_path / "ckpt", ORDERS[order])
    good = cli("merge", root, tmp_path / "good")
    # Each says which rank it is of: nothing is left unproven of that.
    assert good.code == 0 and not good.having("FS114"), good.out
    one, other = (root / rank_file(*place) for place in pair)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 1 and not (tmp_path / "out").exists(), ran.out
    (told,) = (f for f in ran.errors if f["code"] == "FS113")
    assert set(told["files"]) == {rank_file(*place) for place in pair}
    # Each says the other's rank.
    first, second = (
        f"tp {tp}, pp {pp}" for tp, pp in sorted(pair, key=lambda p: told["files"].index(rank_file(*p)))
    )
    assert told["evidence"] == f"inside they state {second} and {first}"


@pytest.mark.parametrize(
    ("rank_of", "more"),
    [
        (lambda tp, pp: 0, {}),
        (lambda tp, pp: None, {}),
        (lambda tp, pp: 8 + tp, {}),
        (lambda tp, pp: "0", {}),
        (lambda tp, pp: 3 - tp, {"encoder_tensor_model_parallel_size": 1}),
    ],
    ids=["all equal", "none", "beyond the world", "no number", "with an encoder's ranks"],
)
def test_ranks_that_tell_nothing_accuse_nobody(rank_of: Any, more: dict[str, Any], tmp_path: Path) -> None:
    ran = cli("merge", ranked(tmp_path / "ckpt", rank_of, **more), tmp_path / "out")
    assert ran.code == 0 and ran.having("FS114"), ran.out


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["of one rank", "of all ranks"])
@pytest.mark.parametrize("command", [("merge",), ("convert", "--to", "hf")], ids=lambda command: command[0])
def test_swapped_stages_contradict_their_own_tensors(
    command: tuple[str, ...], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    # Their arguments name no rank.
    root = copy(LEGACY, tmp_path / "ckpt")
    for tp in ranks:
        one, other = (root / rank_file(tp, pp) for pp in range(2))
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)
    ran = assert_refused(root, tmp_path / "out", "FS113", command=command)
    assert [set(f["files"]) for f in ran.errors] == [{rank_file(tp, 0), rank_file(tp, 1)} for tp in ranks]
    seen = cli("verify", root)
    # What differs between copies follows from it.
    assert seen.code == 1 and {f["code"] for f in seen.errors} == {"FS113"}, seen.out


EMBEDDING, NORM, LAYER = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "decoder.layers.0.w",
)
#: Names of the tensors of each stage, and the stages that are another's.
STAGES: dict[str, tuple[list[list[str]], dict[int, str]]] = {
    "good": ([[EMBEDDING, LAYER], [LAYER], [LAYER, NORM]], {}),
    "tied": ([[EMBEDDING, LAYER], [LAYER], [LAYER, NORM, EMBEDDING]], {}),
    "multi-token prediction": ([[EMBEDDING, LAYER], ["mtp.layers.0.w", EMBEDDING], [NORM]], {}),
    "prediction behind the norm": ([[EMBEDDING, LAYER], [LAYER, NORM], ["mtp.layers.0.w", EMBEDDING]], {}),
    "loss of its own": ([[EMBEDDING], [LAYER], [LAYER], [NORM]], {}),
    "a decoder embeds": (
        [
            [EMBEDDING, "encoder.layers.0.w"],
            ["encoder.final_layernorm.weight"],
            [EMBEDDING, LAYER],
            [LAYER, NORM],
        ],
        {},
    ),
    "an encoder": ([[EMBEDDING, LAYER], ["encoder.final_layernorm.weight"], [LAYER, NORM]], {}),
    "an encoder alone": ([[EMBEDDING], [LAYER], ["encoder.final_layernorm.weight"]], {}),
    "nothing known": ([["a"], ["b"], ["c"]], {}),
    "no embedding at all": ([["a"], ["b"], [NORM]], {}),
    "first and second": ([[LAYER], [EMBEDDING, LAYER], [NORM]], {0: "tp 0, another stage", 1: "tp 0, pp 0"}),
    "second and last": ([[EMBEDDING], [NORM], [LAYER]], {1: "tp 0, pp 2", 2: "tp 0, another stage"}),
    "first and last": ([[NORM, LAYER], [LAYER], [EMBEDDING]], {0: "tp 0, pp 2", 2: "tp 0, pp 0"}),
    "turned": ([[NORM], [EMBEDDING], [LAYER]], {0: "tp 0, pp 2", 1: "tp 0, pp 0"}),
}


@pytest.mark.parametrize("case", STAGES)
def test_stages_are_told_by_what_they_hold(case: str) -> None:
    names, wrong = STAGES[case]
    files = [File(0, f"mp_rank_00_{pp:03d}/model_optim_rng.pt", 1) for pp in range(len(names))]
    source = Source("Megatron-LM")
    found: Found[object] = Found(None, "Megatron-LM", files, None)  # type: ignore[arg-type]
    places = [(pp, (0, pp, 0), [held]) for pp, held in enumerate(names)]
    of_ranks.judge_stages(source, found, places, len(names))
    told = {finding.file: finding.got for finding in source.findings}
    assert told == {files[pp].path: own for pp, own in wrong.items()}


def test_virtual_stages_are_told_by_what_their_last_chunk_holds() -> None:
    def told(stages: list[list[list[str]]]) -> list[str | None]:
        files = [File(0, f"mp_rank_00_{pp:03d}/model_optim_rng.pt", 1) for pp in range(len(stages))]
        source = Source("Megatron-LM")
        found: Found[object] = Found(None, "Megatron-LM", files, None)  # type: ignore[arg-type]
        places = [(pp, (0, pp, 0), chunks) for pp, chunks in enumerate(stages)]
        of_ranks.judge_stages(source, found, places, len(stages))
        return [finding.file for finding in source.findings]

    assert not told([[[EMBEDDING, LAYER], [LAYER]], [[LAYER], [LAYER, NORM]]])
    # The last layer and the norm are in the first stage, prediction in the second.
    assert not told([[[EMBEDDING, LAYER], [LAYER, NORM]], [[LAYER], ["mtp.layers.0.w", EMBEDDING]]])
    assert len(told([[[LAYER], [LAYER, NORM]], [[EMBEDDING, LAYER], [LAYER]]])) == 2


def test_a_rank_whose_arguments_are_of_another_iteration_is_named(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    edit_pt(root / rank_file(1, 0), lambda content: vars(content["args"]).update(iteration=9))
    assert_refused(root, tmp_path / "out", "FS107", rank="tp 1, pp 0", expected="10", got="9")


def test_virtual_stages_interleave(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    for tp in range(2):
        for pp in range(2):

            def split(content: dict[str, Any], pp: int = pp) -> None:
                model = content.pop("model")
                content["args"].virtual_pipeline_model_parallel_size = 2
                for chunk in range(2):
                    content[f"model{chunk}"] = {
                        name.replace(f"layers.{chunk}.", "layers.0."): tensor
                        for name, tensor in model.items()
                        if f"layers.{chunk}." in name
                        or (".layers." not in name and ("embedding" in name) == (chunk == 0))
                    }

            edit_pt(root / rank_file(tp, pp), split)
    assert cli("merge", root, tmp_path / "out").code == 0
    plain = expected(LEGACY, "expected.json")
    # Chunk c of stage p holds layer 2 c + p; it held layer 2 p + c before.
    moved = {0: 0, 1: 2, 2: 1, 3: 3}
    want = {}
    for name, digest in plain.items():
        for old, new in moved.items():
            if f"layers.{old}." in name:
                name = name.replace(f"layers.{old}.", f"layers.{new}.")
                break
        want[name] = digest
    assert hashes(tmp_path / "out") == want


def test_a_model_that_transformers_lacks_is_refused_by_name(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    for tp in range(2):
        for pp in range(2):
            edit_pt(root / rank_file(tp, pp), lambda c: setattr(c["args"], "normalization", "LayerNorm"))
    assert_refused(
        root,
        tmp_path / "out",
        "FS514",
        exit=2,
        command=("convert", "--to", "hf"),
        expected="RMSNorm",
        got="LayerNorm",
    )


def with_optimizer(root: Path, extra: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of the torch_dist fixture, saved again by torch with these tensors besides; its weights."""
    copy(DIST, root)
    folder = root / "iter_0000010"
    weights = {
        name: torch.empty(entry["shape"], dtype=torch.bfloat16)
        for name, entry in json.loads((DIST / "expected.json").read_text())["tensors"].items()
    }
    dcp.load(weights, checkpoint_id=folder, no_dist=True)
    for path in [*folder.glob("*.distcp"), folder / ".metadata"]:
        path.unlink()
    dcp.save({**weights, **extra}, checkpoint_id=folder, no_dist=True)
    return weights


def test_optimizer_state_by_parameter_is_taken_on_request(tmp_path: Path) -> None:
    shapes = {n: t["shape"] for n, t in json.loads((DIST / "expected.json").read_text())["tensors"].items()}
    slots = ("exp_avg", "exp_avg_sq")
    state = {f"{slot}.{name}": torch.randn(shape) for slot in slots for name, shape in shapes.items()}
    prefix = "chained_0.optimizer.state"
    root = tmp_path / "ckpt"
    weights = with_optimizer(tmp_path / "plain", {})
    masters = {f"{prefix}.fp32_param.{name}": tensor.float() for name, tensor in weights.items()}
    with_optimizer(root, {f"{prefix}.{key}": tensor for key, tensor in state.items()} | masters)
    ran = cli("merge", root, tmp_path / "weights")
    assert ran.code == 0, ran.out
    assert ran.having("FS212", message="exp_avg, exp_avg_sq")
    assert hashes(tmp_path / "weights") == expected(DIST, "expected.json")
    assert cli("convert", root, tmp_path / "hf", "--to", "hf", "--vocab-size", "1000").code == 0
    assert hashes(tmp_path / "hf") == expected(DIST, "expected_hf.json")
    assert cli("merge", root, tmp_path / "all", "--optimizer").code == 0
    have = read_result(tmp_path / "all")
    for key, tensor in state.items():
        slot, _, name = key.partition(".")
        assert torch.equal(have[f"{name}.{slot}"], tensor)

    lacking = tmp_path / "lacking"
    gone = "exp_avg.decoder.layers.mlp.linear_fc2.weight"
    with_optimizer(lacking, {f"{prefix}.{key}": tensor for key, tensor in state.items() if key != gone})
    assert cli("merge", lacking, tmp_path / "fine").code == 0
    assert_refused(
        lacking,
        tmp_path / "none",
        "FS102",
        exit=3,
        command=("merge", "--optimizer"),
        tensor="linear_fc2.weight",
    )


def test_optimizer_state_in_flat_buffers_is_refused_by_name(tmp_path: Path) -> None:
    flat = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_bfloat16.bucket_idx_0.exp_avg"
    root = tmp_path / "ckpt"
    with_optimizer(root, {flat: torch.randn(999)})
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert ran.having("FS514", tensor=flat)
    assert hashes(tmp_path / "out") == expected(DIST, "expected.json")
    assert_refused(root, tmp_path / "all", "FS514", exit=2, command=("merge", "--optimizer"), tensor=flat)


def test_rows_in_the_order_of_old_versions_are_refused(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    for tp in (0, 1):
        for pp in (0, 1):
            edit_pt(root / rank_file(tp, pp), lambda state: state.update(checkpoint_version=1.0))
    assert_refused(root, tmp_path / "out", "FS514", exit=2, expected="2.0 or later", got="1.0")


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "one tensor lost"])
def test_a_size_that_nothing_states_makes_no_tensor_missing(lost: bool, tmp_path: Path) -> None:
    """What could not be placed is there; what is not there is told besides."""
    root = copy(LEGACY, tmp_path / "ckpt")
    for file in root.rglob("*.pt"):
        edit_pt(
            file,
            lambda content: [
                vars(content["args"]).pop(key, None)
                for key in ("num_attention_heads", "kv_channels", "num_query_groups")
            ],
        )
    if lost:
        edit_pt(
            root / rank_file(1, 1),
            lambda content: content["model"].pop(
                next(
                    name
                    for name in content["model"]
                    if name.endswith("layers.1.self_attention.linear_qkv.weight")
                )
            ),
        )
    ran = cli("inspect", root)
    missing = [f["tensor"] for f in ran.errors if f["code"] == "FS102"]
    assert ran.code == 2 and ran.having("FS213")
    assert missing == (["decoder.layers.3.self_attention.linear_qkv.weight"] if lost else []), ran.out
