"""Statistics: against torch, by the command line, in manifests, in diff, and zero slabs in verify."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastshard
import jsonschema
import pytest
import torch
from fastshard import _core
from fastshard.cli.stats_table import sparkline, stats_table
from helpers import HF, NEOX, STEP, TP4, cli, copy, edit_pt, flip_payload, layer_file, load_file, save_file

if TYPE_CHECKING:
    from fastshard._core import RunOptions

MEMORY = "2GiB"
EDGES = torch.tensor(fastshard.HISTOGRAM_EDGES, dtype=torch.float64)


def checkpoint(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def with_zeros(tensor: torch.Tensor, dim: int, start: int, end: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.narrow(dim, start, end - start).zero_()
    return tensor


def only(folder: Path) -> fastshard.TensorStats:
    (stats,) = fastshard.stats(folder, memory=MEMORY).values()
    return stats


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_figures_are_torchs(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = normal(300, 500)
    tensor[3, 5:9] = torch.tensor([0.0, -0.0, 100.0, -100.0])
    tensor = tensor.to(dtype)
    stats = only(checkpoint(tmp_path / "ckpt", w=tensor))
    wide = tensor.double()
    assert (stats.count, stats.shape) == (150_000, (300, 500))
    assert (stats.min, stats.max) == (wide.min().item(), wide.max().item())
    assert stats.mean == pytest.approx(wide.mean().item(), rel=1e-9, abs=1e-12)
    assert stats.std == pytest.approx(wide.std(correction=0).item(), rel=1e-9)
    assert stats.zeros == int((wide == 0).sum()) >= 2
    # The same bins by other means: searchsorted over the edges told.
    values = wide[wide != 0]
    bins = torch.where(
        values > 0, torch.searchsorted(EDGES, values, right=True), torch.searchsorted(EDGES, values)
    )
    assert list(stats.histogram) == torch.bincount(bins, minlength=64).tolist()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
def test_integers_too(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (40, 30), generator=torch.Generator().manual_seed(1)).to(dtype)
    stats = only(checkpoint(tmp_path / "ckpt", w=tensor))
    assert (stats.min, stats.max, stats.zeros) == (0, 1, int((tensor == 0).sum()))
    assert isinstance(stats.max, int)
    assert stats.mean == pytest.approx(tensor.double().mean().item())


def test_large_integers_are_exact(tmp_path: Path) -> None:
    ends = torch.iinfo(torch.int64)
    stats = only(checkpoint(tmp_path / "ckpt", w=torch.tensor([ends.min, ends.max - 1, 0])))
    assert (stats.min, stats.max) == (ends.min, ends.max - 1)


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    tensor = torch.tensor([math.nan, math.inf, -math.inf, math.nan, 1.0, 3.0])
    stats = only(checkpoint(tmp_path / "ckpt", w=tensor))
    assert (stats.nan, stats.inf, stats.min, stats.max, stats.mean, stats.std) == (2, 2, 1.0, 3.0, 2.0, 1.0)
    stats = only(checkpoint(tmp_path / "none", w=tensor[:4]))
    assert (stats.min, stats.max, stats.mean, stats.std) == (None, None, None, None)


def test_empty_and_scalar(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "ckpt", empty=torch.zeros(0, 5), scalar=torch.tensor(2.5))
    stats = fastshard.stats(folder, memory=MEMORY)
    assert (stats["empty"].count, stats["empty"].mean, stats["empty"].zero_share) == (0, None, 0.0)
    assert (stats["scalar"].mean, stats["scalar"].std, stats["scalar"].shape) == (2.5, 0.0, ())
    assert stats["empty"].overlap(stats["empty"]) == 1.0 and stats["empty"].overlap(stats["scalar"]) == 0.0


@pytest.mark.parametrize(("dim", "word"), [(0, "rows"), (1, "columns")])
def test_a_lost_half_shows(tmp_path: Path, dim: int, word: str) -> None:
    folder = checkpoint(tmp_path / "ckpt", w=with_zeros(normal(64, 64), dim, 32, 64))
    (slab,) = only(folder).zero_slabs
    assert (slab.dim, slab.indices, slab.ranges) == (dim, 32, ((32, 64),))
    ran = cli("stats", folder, json_output=False)
    assert f"{word} 32-63" in ran.out and "50%" in ran.out
    ran = cli("verify", folder)
    assert ran.code == 0, "a warning"
    (finding,) = ran.having("FS313", tensor="w", file="model.safetensors")
    assert (finding["severity"], finding["got"]) == ("warning", f"zeros in {word} 32-63")


def test_a_lost_half_of_any_dimension_of_a_stack(tmp_path: Path) -> None:
    stacked = with_zeros(normal(6, 4, 10).bfloat16(), 2, 5, 10)
    folder = checkpoint(tmp_path / "ckpt", experts=stacked)
    assert cli("verify", folder).having("FS313", got="zeros in indices 5-9 of dim 2")


def test_what_is_no_lost_shard_gives_no_warning(tmp_path: Path) -> None:
    scattered = normal(64, 64)
    scattered[torch.rand(64, 64, generator=torch.Generator().manual_seed(2)) < 0.5] = 0
    folder = checkpoint(
        tmp_path / "ckpt",
        bias=torch.zeros(64),
        moments=torch.zeros(8, 8),
        half_of_a_vector=with_zeros(normal(64), 0, 32, 64),
        positions=with_zeros(torch.ones(8, 8, dtype=torch.int64), 0, 0, 4),
        scattered=scattered,
        one_row=with_zeros(normal(1, 64), 1, 0, 32),
    )
    ran = cli("verify", folder)
    assert (ran.code, ran.having("FS313")) == (0, [])
    assert fastshard.stats(folder, memory=MEMORY)["positions"].zero_slabs, "told all the same"


def test_a_lost_shard_is_found_in_its_file(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")
    name, file = "model.layers.1.mlp.down_proj.weight", root / "tp_rank_02.safetensors"
    tensors = load_file(file)
    tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, file)
    (finding,) = cli("verify", root).having("FS313")
    assert (finding["tensor"], finding["file"]) == (name, file.name)
    assert finding["got"] == "zeros in columns 24-35", "the columns of the third of four ranks"


@pytest.mark.parametrize("to", ["megatron", "gpt_neox", "hf"])
def test_padding_is_no_lost_shard(tmp_path: Path, to: str) -> None:
    source = NEOX if to == "gpt_neox" else HF
    options = ["--tp", "2"] if to != "hf" else []
    assert cli("convert", source, tmp_path / "out", "--to", to, *options).code == 0
    assert not cli("verify", tmp_path / "out").having("FS313")


@pytest.mark.parametrize("source", [HF, TP4, NEOX], ids=lambda p: p.name)
def test_whole_tensors_whatever_the_sharding(source: Path) -> None:
    stats = fastshard.stats(source, memory=MEMORY)
    with fastshard.open(source) as ckpt:
        assert list(stats) == list(ckpt)
        for name, tensor in ckpt.items():
            wide = tensor.torch().double()
            found = stats[name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert (found.min, found.max) == (wide.min().item(), wide.max().item())
            assert found.mean == pytest.approx(wide.mean().item(), rel=1e-9, abs=1e-12)
            assert found.std == pytest.approx(wide.std(correction=0).item(), rel=1e-9, abs=1e-12)


def test_command_line(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "ckpt", **{"a.w": normal(8, 8), "b.w": normal(8, 8), "b.n": torch.ones(8)})
    ran = cli("stats", folder, "--include", "b.*", "--exclude", "*.n")
    assert (ran.code, list(ran.doc["tensors"])) == (0, ["b.w"])
    assert ran.doc["histogram_edges"] == list(fastshard.HISTOGRAM_EDGES)
    found = ran.doc["tensors"]["b.w"]
    assert found == only_json(fastshard.stats(folder, include=["b.w"], memory=MEMORY)["b.w"])
    text = cli("stats", folder, json_output=False).out
    assert all(name in text for name in ("a.w", "b.w", "b.n")) and "█" not in text
    assert "█" in cli("stats", folder, "-v", json_output=False).out
    assert cli("stats", folder, "--include", "none*").code == 2
    assert cli("stats", tmp_path / "nothing").code == 2
    assert cli("stats", folder, "--threads", "0").code == 2


def only_json(stats: fastshard.TensorStats) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(stats.to_dict()))
    return document


def test_a_damaged_checkpoint_has_no_statistics(tmp_path: Path) -> None:
    root = copy(NEOX, tmp_path / "ckpt")
    file = root / STEP / layer_file(3, 1)
    state = torch.load(file, weights_only=False)
    flip_payload(file, next(iter(state.values())))
    ran = cli("stats", root)
    assert ran.code == 1 and ran.having("FS301"), ran.out
    file.unlink()
    assert cli("stats", root).code == 3


def test_sparkline_shows_whatever_is_there() -> None:
    bins = [0] * 64
    bins[0], bins[63] = 1, 10**12
    assert sparkline(bins) == "▁" + " " * 30 + "█"
    assert sparkline([0] * 64).strip() == ""
    assert stats_table({}) == "no tensors"


def test_a_terminal_without_blocks_gets_other_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = fastshard.stats(checkpoint(tmp_path / "ckpt", w=torch.ones(3)), memory=MEMORY)
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert "@" in stats_table(stats)


# manifests

SCHEMA = json.loads((files("fastshard") / "schemas/manifest.v1.schema.json").read_text())


def manifest_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "fastshard.manifest.json").read_text())
    jsonschema.validate(document, SCHEMA)
    return document


@pytest.mark.parametrize(
    "command", [("merge",), ("convert", "--to", "hf"), ("convert", "--to", "gpt_neox")], ids=" ".join
)
def test_results_carry_them_if_asked(tmp_path: Path, command: tuple[str, ...]) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    assert cli(command[0], NEOX, plain, *command[1:]).code == 0
    assert all("stats" not in t for t in manifest_of(plain)["tensors"])
    assert cli(command[0], NEOX, out, *command[1:], "--stats").code == 0
    tensors = manifest_of(out)["tensors"]
    strip = [{k: v for k, v in t.items() if k != "stats"} for t in tensors]
    assert strip == manifest_of(plain)["tensors"], "nothing else changes"
    assert cli("verify", out).code == 0
    if command[-1] != "gpt_neox":
        found = fastshard.stats(out, memory=MEMORY)
        for tensor in tensors:
            kept = fastshard.TensorStats.from_dict(tensor["dtype"], tensor["shape"], tensor["stats"])
            assert kept == found[tensor["name"]]


def test_inventory_carries_them_if_asked(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "ckpt", w=with_zeros(normal(8, 8), 1, 2, 4))
    assert cli("manifest", folder, "--stats").code == 0
    (tensor,) = manifest_of(folder)["tensors"]
    assert tensor["stats"]["zero_slabs"] == [{"dim": 1, "indices": 2, "ranges": [[2, 4]]}]
    assert cli("verify", folder).code == 0
    made = fastshard.manifest(folder, tmp_path / "m.json", stats=True, memory=MEMORY)
    assert made["w"]["stats"] == tensor["stats"]


@pytest.mark.parametrize(
    "change",
    [
        {"histogram": [0] * 65},
        {"histogram": [1 << 70] + [0] * 63},
        {"count": 1},
        {"zeros": -1},
        {"min": "small"},
        {"min": 5.0},
        {"std": -1.0},
        {"mean": 1e999},
        {"zero_slabs": [{"dim": 7, "indices": 1, "ranges": [[0, 1]]}]},
        {"zero_slabs": [{"dim": 0, "indices": 1, "ranges": [[0, 1]] * 1000}]},
        {"zero_slabs": [{"dim": 0, "indices": 1, "ranges": [[3, 1 << 63]]}]},
    ],
    ids=str,
)
def test_statistics_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = checkpoint(tmp_path / "ckpt", w=normal(8, 8))
    assert cli("manifest", folder, "--stats").code == 0
    assert cli("verify", folder).code == 0
    document = manifest_of(folder)
    document["tensors"][0]["stats"] |= change
    (folder / "fastshard.manifest.json").write_text(json.dumps(document))
    ran = cli("verify", folder)
    assert (ran.code, len(ran.having("FS518"))) == (2, 1), ran.out


# diff


def difference(a: torch.Tensor, b: torch.Tensor, tmp_path: Path) -> fastshard.Difference:
    x, y = (
        checkpoint(tmp_path / "a", w=a, same=torch.ones(3)),
        checkpoint(tmp_path / "b", w=b, same=torch.ones(3)),
    )
    (found,) = fastshard.diff(x, y, memory=MEMORY)
    ran = cli("diff", x, y)
    assert ran.code == 1 and ran.doc["differences"][0]["b_stats"]["count"] == b.numel()
    return found


def test_diff_says_what_is_zero_on_one_side(tmp_path: Path) -> None:
    w = with_zeros(normal(64, 64), 1, 0, 4)
    found = difference(w, with_zeros(w, 0, 32, 64), tmp_path)
    assert found.distributions.endswith("; rows 32-63 are zero in B only"), found.distributions
    assert f"A has mean {w.double().mean().item():.6g}, std" in str(found.to_finding())


def test_diff_says_so_of_slabs_that_grew(tmp_path: Path) -> None:
    w = with_zeros(normal(64, 64), 1, 8, 16)
    found = difference(with_zeros(w, 1, 4, 24), w, tmp_path)
    assert found.distributions.endswith("; columns 4-7, 16-23 are zero in A only"), found.distributions
    assert "zero in B" not in found.distributions


def test_diff_says_so_of_a_tensor_that_is_zero(tmp_path: Path) -> None:
    found = difference(normal(4, 4), torch.zeros(4, 4), tmp_path)
    assert found.distributions.endswith("; all elements are zero in B only")


@pytest.mark.parametrize(
    "other", [normal(64, 32).repeat(1, 2), normal(64, 32).bfloat16()], ids=["shape", "dtype"]
)
def test_diff_shows_distributions_of_other_shapes_and_dtypes(tmp_path: Path, other: torch.Tensor) -> None:
    found = difference(normal(64, 32), other, tmp_path)
    assert found.a_stats and found.b_stats
    assert found.kind == ("shape" if other.shape[1] == 64 else "dtype")
    assert found.a_stats.overlap(found.b_stats) > 0.98
    assert "B has mean" in found.to_finding().message


def test_overlap_tells_alike_from_shifted(tmp_path: Path) -> None:
    w = normal(64, 64)
    folder = checkpoint(tmp_path / "c", w=w, swapped=w.flip(0).contiguous(), larger=w * 64, nan=w.log())
    stats = fastshard.stats(folder, memory=MEMORY)
    assert stats["w"].overlap(stats["swapped"]) == 1.0
    assert stats["w"].overlap(stats["larger"]) < 0.2
    assert stats["nan"].nan > 1000
    assert 0 <= stats["w"].overlap(stats["nan"]) < 0.5
    edited = copy(NEOX, tmp_path / "neox")
    edit_pt(edited / STEP / layer_file(3, 1), lambda layer: layer["mlp.linear1.weight"].mul_(2))
    (found,) = fastshard.diff(NEOX, edited, memory=MEMORY)
    assert "overlap by" in found.distributions


def test_memory_counts_the_statistics_of_each_tensor(tmp_path: Path) -> None:
    count = 20_000
    folder = checkpoint(tmp_path / "ckpt", **{f"t{i}": torch.ones(1) for i in range(count)})
    plan = fastshard.open(folder)._plan

    def find_need(**options: Any) -> int:
        """MiB that a run without any memory asks for."""
        run: RunOptions = {"memory": 0, "threads": 1, "scratch_dir": str(tmp_path), **options}  # type: ignore[typeddict-item]
        with pytest.raises(_core.CoreError) as refused:
            plan.core.check(run, None)
        (finding,) = refused.value.args[0]
        assert finding.code == "FS512"
        return int(re.findall(r"at least (\d+) MiB", finding.expected)[0])

    # Half of it: what the process holds besides is another at each time.
    assert find_need(stats="full") - find_need() >= count * 1250 >> 20
    assert len(fastshard.stats(folder)) == count, "the default grows with the tensors"
