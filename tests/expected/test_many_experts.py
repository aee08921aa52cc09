"""A model with many experts is judged by a few of them where the others are equal, and by all where not."""

from __future__ import annotations

from typing import Any

from fastshard.expected import heuristics
from fastshard.expected.from_layers import leave_out_equal_experts
from hypothesis import given, settings
from hypothesis import strategies as st

CONFIG = {"model_type": "toy", "hidden_size": 8, "vocab_size": 32, "num_hidden_layers": 5, "num_experts": 12}
Tensors = dict[str, tuple[tuple[int, ...], str]]


def _make_model(layers: int, experts: int, dense: int = 0) -> Tensors:
    """Make the names of a mixture of experts; the first ``dense`` layers have none."""
    tensors: Tensors = {"model.embed_tokens.weight": ((32, 8), "BF16")}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{block}.self_attn.{module}.weight"] = ((8, 8), "BF16")
        tensors[f"{block}.input_layernorm.weight"] = ((8,), "BF16")
        if layer >= dense:
            tensors[f"{block}.mlp.gate.weight"] = ((experts, 8), "BF16")
        for expert in range(experts if layer >= dense else 0):
            for module in ("gate_proj", "up_proj", "down_proj"):
                tensors[f"{block}.mlp.experts.{expert}.{module}.weight"] = ((4, 8), "BF16")
    tensors["model.norm.weight"] = ((8,), "BF16")
    return tensors


def _judge_all(tensors: Tensors, config: dict[str, Any] | None, **options: Any) -> heuristics.Evidence:
    """Judge a model by all its experts."""
    few = heuristics.leave_out_equal_experts
    heuristics.leave_out_equal_experts = lambda tensors: None  # type: ignore[assignment]
    try:
        return heuristics.judge(tensors, config, **options)
    finally:
        heuristics.leave_out_equal_experts = few


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_few_experts_tell_what_all_tell(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 4, 8, 9, 12, 13]))
    tensors = _make_model(layers, experts, data.draw(st.integers(0, 2)))
    names = sorted(tensors)
    for name in data.draw(st.lists(st.sampled_from(names), max_size=3)):
        match data.draw(
            st.sampled_from(["drop", "transpose", "slice", "rename", "layer", "expert", "dtype"])
        ):
            case "drop":
                tensors.pop(name, None)
            case "transpose" if name in tensors:
                tensors[name] = tensors[name][0][::-1], "BF16"
            case "slice" if name in tensors:
                tensors[name] = (tensors[name][0][0] // 2, *tensors[name][0][1:]), "BF16"
            case "dtype" if name in tensors:
                tensors[name] = tensors[name][0], "F32"
            case "rename" if name in tensors:
                tensors[name.replace("proj", "other")] = tensors.pop(name)
            case "layer" | "expert" as what:
                part = name.partition(".experts.")
                if what == "expert" and part[1]:
                    prefix = f"{part[0]}.experts.{part[2].partition('.')[0]}."
                else:
                    prefix = ".".join(name.split(".")[:3]) + "."
                tensors = {other: of for other, of in tensors.items() if not other.startswith(prefix)}
            case _:
                pass
    if not tensors:
        return
    if data.draw(st.booleans()):
        tensors = dict(sorted(tensors.items()))
    config = data.draw(st.sampled_from([None, CONFIG, {**CONFIG, "num_experts": 9}]))
    lost = data.draw(st.sampled_from([(), ("model.layers.1.mlp.experts.2.up_proj.weight",)]))
    options = {"saved_whole": data.draw(st.booleans()), "in_files": data.draw(st.booleans()), "lost": lost}
    assert heuristics.judge(tensors, config, **options) == _judge_all(tensors, config, **options)


def test_of_many_equal_experts_eight_are_looked_at() -> None:
    tensors = _make_model(4, 64)
    few = leave_out_equal_experts(tensors)
    assert few is not None and len(few.tensors) == 4 * (6 + 8 * 3) + 2
    assert few.further == {f"model.layers.{layer}.mlp.experts.": 56 for layer in range(4)}
    evidence = heuristics.judge(tensors, {**CONFIG, "num_hidden_layers": 4, "num_experts": 64})
    assert not evidence.findings and evidence.count == len(tensors)


def test_one_expert_that_differs_has_all_looked_at() -> None:
    for change in ("drop", "shape", "gap"):
        tensors = _make_model(4, 64)
        name = "model.layers.2.mlp.experts.40.up_proj.weight"
        if change == "shape":
            tensors[name] = ((2, 8), "BF16")
        else:
            del tensors[name]
        if change == "gap":
            tensors = {name: of for name, of in tensors.items() if ".2.mlp.experts.40." not in name}
        assert leave_out_equal_experts(tensors) is None
        findings = heuristics.judge(tensors, {**CONFIG, "num_experts": 64}).findings
        assert any("model.layers.2.mlp.experts.40" in (finding.tensor or "") for finding in findings)
