"""Conversions in memory: the tensors are those that a conversion writes, and what it refuses is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
import torch
import transformers
from fastshard.checkpoint.tensor_slice import Slice
from helpers import FIXTURES, HF, NEOX, STEP, copy, edit_pt, layer_file
from safetensors import safe_open as safe_open_of_others
from safetensors.torch import load_file, save_file

LLAMA = FIXTURES / "gpt_neox/llama_gqa_pp_tp2"
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt_neox/neox_pp_tp2", "hf", {}),
    ("gpt_neox/llama_gqa_pp_tp2", "hf", {"dtype": "f32"}),
    ("sharded/megatron_torch_dist_tp2_pp2", "hf", {}),
    ("sharded/moe_megatron_legacy_tp2_ep2", "hf", {}),
    ("sharded/tp4_vocabpad", "hf", {}),
    ("sharded/hf_sharded", "megatron:legacy", {"tp": 2}),
    ("maxtext_twins/a_mt_f32_scan", "hf", {"exclude": ["*norm*"]}),
]


@pytest.mark.parametrize("source, to, options", CASES, ids=lambda v: str(v).rpartition("/")[2])
def test_it_holds_what_a_conversion_writes(
    source: str, to: str, options: dict[str, Any], tmp_path: Path
) -> None:
    view = fastshard.open(FIXTURES / source, to=to, **options)
    manifest = fastshard.convert(FIXTURES / source, tmp_path / "out", to=to, **options)
    written = fastshard.plan(FIXTURES / source, to=to, **options)
    assert list(view) == list(written.index) and len(view) == len(manifest)
    if to == "hf":
        saved: dict[str, torch.Tensor] = {}
        for file in (tmp_path / "out").glob("*.safetensors"):
            saved |= load_file(file)
        assert saved.keys() == view.keys()
        for name, tensor in view.torch().items():
            assert tensor.dtype == saved[name].dtype and torch.equal(tensor, saved[name]), name
        assert view.config == json.loads((tmp_path / "out/config.json").read_text())
    before = view.not_checked
    assert not view.verified and any("verify()" in line for line in before)
    view.verify()
    assert view.verified and not any("verify()" in line for line in view.not_checked)
    assert set(view.not_checked) <= set(before)


def test_a_checkpoint_that_is_open_will_do() -> None:
    ckpt = fastshard.open(NEOX)
    assert list(fastshard.open(ckpt, to="hf")) == list(fastshard.open(NEOX, to="hf"))
    with pytest.raises(fastshard.FastshardError, match="is already open"):
        fastshard.open(ckpt, to="hf", step="1")


def test_ranks_have_names_of_their_own() -> None:
    view = fastshard.open(FIXTURES / "sharded/hf_sharded", to="tp-safetensors", tp=2)
    first, second = (name for name in view if name.endswith(":lm_head.weight"))
    whole = fastshard.open(FIXTURES / "sharded/hf_sharded")["lm_head.weight"].torch()
    assert torch.equal(torch.cat([view[first].torch(), view[second].torch()])[: len(whole)], whole)


def test_options_without_a_target_and_unknown_ones() -> None:
    with pytest.raises(fastshard.FastshardError, match="these options need to="):
        fastshard.open(NEOX, dtype="f32")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="did you mean dtype"):
        fastshard.open(NEOX, to="hf", dtyp="f32")  # type: ignore[call-overload]
    with pytest.raises(fastshard.FastshardError):
        fastshard.open(NEOX, to="hff")


def test_what_a_conversion_refuses_is_refused(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    with pytest.raises(fastshard.IncompleteError, match=layer_file(3, 1)):
        fastshard.open(ckpt, to="hf")


def test_copies_that_differ_are_found_when_they_are_read(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    edit_pt(ckpt / STEP / layer_file(3, 1), lambda layer: layer["input_layernorm.weight"].add_(1))
    view = fastshard.open(ckpt, to="hf")
    with pytest.raises(fastshard.FastshardError, match="copies of this tensor differ"):
        view["gpt_neox.layers.1.input_layernorm.weight"].numpy()
    mean = fastshard.open(ckpt, to="hf", replicas="mean")
    assert mean["gpt_neox.layers.1.input_layernorm.weight"].numpy() is not None


def test_what_only_all_of_it_shows_is_said_and_then_found(tmp_path: Path) -> None:
    """A flipped bit changes no header: what is read one by one is not held against checksums."""
    ckpt = copy(NEOX, tmp_path / "ckpt")
    file = ckpt / STEP / layer_file(3, 1)
    place = fastshard.plan(ckpt, to="hf").trace("gpt_neox.layers.1.mlp.dense_4h_to_h.weight")["parts"][1]
    at = place["sources"][0]["places"][0]["offset"]
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    view = fastshard.open(ckpt, to="hf")
    assert any("checksums" in line and "verify()" in line for line in view.not_checked)
    with pytest.raises(fastshard.ProblemError, match="CRC32"):
        view.verify()
    assert not view.verified and any("checksums" in line for line in view.not_checked)
    with pytest.raises(fastshard.ProblemError, match="CRC32"):
        fastshard.load_model(ckpt)


# --- readers of arrays


DTYPES = ["float32", "float16", "bfloat16", "int64", "uint8", "bool", "float8_e4m3fn", "complex64"]


@pytest.fixture
def every(tmp_path: Path) -> Path:
    """A tensor of each dtype, and odd shapes."""
    tensors = {name: torch.arange(24).reshape(2, 3, 4).to(getattr(torch, name)) for name in DTYPES}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "made by": "x"})
    return tmp_path


KEYS: list[Any] = [
    slice(None),
    slice(0, 1),
    slice(1, None),
    (slice(0, 1), slice(1, 3)),
    (slice(None), slice(0, 2), slice(3, 4)),
]


@pytest.mark.parametrize("framework", ["pt", "np", "jax"])
def test_it_reads_as_safetensors_does(every: Path, framework: str) -> None:
    if framework == "jax":
        pytest.importorskip("jax", reason="pip install '.[orbax-real]'")
    theirs_of = "flax" if framework == "jax" else framework
    with (
        safe_open_of_others(str(every / "model.safetensors"), framework=theirs_of) as theirs,
        fastshard.safe_open(every, framework=framework) as ours,
    ):
        assert sorted(ours.keys()) == sorted(theirs.keys()) and ours.metadata() == theirs.metadata()
        for name in ours.keys():  # noqa: SIM118 - it is no mapping
            if framework != "pt" and name == "float8_e4m3fn":
                continue  # theirs has none
            if framework == "jax" and name == "int64":
                with pytest.raises(ValueError, match="jax_enable_x64"):
                    ours.get_tensor(name)
                continue
            same(ours.get_tensor(name), theirs.get_tensor(name))
            one, other = ours.get_slice(name), theirs.get_slice(name)
            assert (one.get_shape(), one.get_dtype()) == (other.get_shape(), other.get_dtype())
            if len(one.get_shape()) == 3 and framework != "jax":
                for key in KEYS:
                    same(one[key], other[key])


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b) and a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape)
    if isinstance(a, torch.Tensor):
        a, b = (t.contiguous().reshape(-1).view(torch.uint8).numpy() for t in (a, b))
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_checkpoint_with_an_error_is_not_read(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    for options in ({}, {"to": "hf"}):
        with pytest.raises(fastshard.IncompleteError, match=layer_file(3, 1)):
            fastshard.safe_open(ckpt, **options)


def test_a_large_tensor_is_read_on_several_threads(tmp_path: Path) -> None:
    """Shares of it begin anywhere: each byte is where it would be, from odd rows too."""
    rows, columns = 1234, 4099
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    for rank, part in enumerate(whole.chunk(2, dim=1) if columns % 2 == 0 else (whole[:617], whole[617:])):
        save_file({"w": part.contiguous()}, tmp_path / f"tp_rank_{rank:02d}.safetensors")
    (tmp_path / "layout.json").write_text(json.dumps({"tp": 2, "tp_dim": {"w": 0}}))
    tensor = fastshard.open(tmp_path)["w"]
    assert tensor.nbytes > 16 << 20 and len(tensor.pieces) == 2
    assert torch.equal(tensor.torch(), whole)
    for start, stop in ((1, 1234), (3, 1000), (616, 618), (0, 1233)):
        assert torch.equal(tensor.torch_rows(start, stop), whole[start:stop])


def test_what_is_stored_wider_is_said_to_be_rounded(tmp_path: Path) -> None:
    from fastshard import examples

    config = examples.CONFIGS["llama"]
    with fastshard.Writer(tmp_path / "mixed", config=config) as writer:
        for name, value in examples.tensors("llama"):
            array = torch.from_numpy(value.copy())
            writer[name] = array if "norm" in name else array.bfloat16()
    with pytest.warns(UserWarning, match="stored with a wider dtype than bfloat16"):
        assert fastshard.load_model(tmp_path / "mixed").dtype == torch.bfloat16


def test_only_the_rows_asked_for_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    view = fastshard.open(LLAMA, to="hf")
    tensor = view["model.embed_tokens.weight"]
    asked: list[int] = []
    real = fastshard.Tensor._bytes
    monkeypatch.setattr(
        fastshard.Tensor,
        "_bytes",
        lambda self, start, length, **how: asked.append(length) or real(self, start, length, **how),
    )
    row = tensor.nbytes // tensor.shape[0]
    assert Slice(tensor)[3:5].shape[0] == 2 and tensor[3:5].shape[0] == 2
    assert asked == [2 * row, 2 * row]


@pytest.mark.parametrize("name", DTYPES)
def test_dlpack(every: Path, name: str) -> None:
    tensor = fastshard.open(every)[name]
    lent = torch.from_dlpack(tensor)
    assert torch.equal(
        lent.view(torch.uint8) if name != "bool" else lent,
        tensor.torch().view(torch.uint8) if name != "bool" else tensor.torch(),
    )
    before = (every / "model.safetensors").read_bytes()
    lent.zero_()
    assert (every / "model.safetensors").read_bytes() == before, "the file was written to"
    if name not in ("bfloat16", "float8_e4m3fn"):
        assert np.array_equal(np.from_dlpack(tensor), tensor.numpy())


def test_dlpack_of_bfloat16_needs_torch(every: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = fastshard.open(every)["bfloat16"]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BufferError, match="needs torch"):
        tensor.__dlpack__()


def test_a_bad_framework_is_named() -> None:
    with pytest.raises(fastshard.FastshardError, match="framework"):
        fastshard.safe_open(HF, framework="tf")


# --- models


@pytest.mark.parametrize(
    "source",
    [
        "gpt_neox/neox_pp_tp2",
        "gpt_neox/neox_legacy_pp_tp2_tied",
        "sharded/megatron_torch_dist_tp2_pp2",
        "sharded/moe_megatron_legacy_tp2_ep2",
        "sharded/hf_sharded",
    ],
)
def test_a_model_computes_what_the_converted_one_does(source: str, tmp_path: Path) -> None:
    before = sorted(p.as_posix() for p in (FIXTURES / source).rglob("*"))
    model = fastshard.load_model(FIXTURES / source)
    assert sorted(p.as_posix() for p in (FIXTURES / source).rglob("*")) == before
    fastshard.convert(FIXTURES / source, tmp_path / "out", to="hf")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, other(tokens).logits)
    assert type(model) is type(other) and model.dtype == other.dtype
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in other.named_parameters()}


def test_state_dicts_are_assigned() -> None:
    """A loop of one's own: the tensors go into a model that has none yet."""
    view = fastshard.open(LLAMA, to="hf")
    config = transformers.CONFIG_MAPPING[view.config["model_type"]].from_dict(view.config)  # type: ignore[index]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(view.torch(), assign=True, strict=True)
    assert not missing and not unexpected
    assert torch.equal(model.lm_head.weight, view["lm_head.weight"].torch())


def test_a_model_that_would_be_partly_random_is_refused() -> None:
    with pytest.raises(fastshard.FastshardError) as caught:
        fastshard.load_model(LLAMA, exclude=["*mlp*"])
    assert caught.value.code == "FS102" and "mlp" in str(caught.value.tensor)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    config = json.loads((ckpt / "config.json").read_text())
    config |= {
        "architectures": ["EvilForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "evil.EvilForCausalLM"},
    }
    (ckpt / "config.json").write_text(json.dumps(config))
    (ckpt / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(fastshard.FastshardError) as caught:
        fastshard.load_model(ckpt)
    assert caught.value.code == "FS514" and "EvilForCausalLM" in str(caught.value)
    for name in ("os", "Trainer", "pipeline", "__builtins__"):
        (ckpt / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        with pytest.raises(fastshard.FastshardError):
            fastshard.load_model(ckpt)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]"], ids=["cut", "deep", "list"])
def test_a_damaged_generation_config_is_a_finding(text: str, tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    (ckpt / "generation_config.json").write_text(text)
    with pytest.raises(fastshard.FastshardError) as caught:
        fastshard.load_model(ckpt)
    assert caught.value.code == "FS211" and str(caught.value.path).endswith("generation_config.json")


def test_it_is_silent_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    fastshard.load_model(NEOX)
    assert capfd.readouterr() == ("", "")


def test_a_view_is_as_it_was_opened() -> None:
    view = fastshard.open(NEOX, to="hf")
    assert fastshard.load_model(view) is not None and view.verified
    with pytest.raises(fastshard.FastshardError, match="fixed when it is opened"):
        fastshard.load_model(view, dtype="f32")
    assert not fastshard.load_model(fastshard.open(NEOX, to="hf"), verify=False).training
