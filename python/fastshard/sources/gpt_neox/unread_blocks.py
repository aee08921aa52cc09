"""Blocks of GPT-NeoX other than attention and MLP, which are recognised by tensor names but not supported."""

from __future__ import annotations

from ...common import codes
from ...common.errors import Finding
from ...layouts.declaration import Unit
from ..base import Contents, Found

#: Prefixes of the names in a layer, by kind, and the setting that creates the kind.
#: source: gpt-neox megatron/model/{moe,router,gmlp}.py, mamba/mamba.py, rwkv/v6/rwkv.py, gpt2_model.py
#: (init_specs)
_BEGINNINGS = {
    "MoE layers (moe_num_experts)": (
        "mlp.router.",
        "mlp.experts.",
        "mlp.deepspeed_moe.",
        "mlp.moe.",
    ),
    "Mamba blocks (attention_config: mamba)": ("mixer.",),
    "RWKV blocks (attention_config: rwkv)": ("att.", "ffn."),
    "gMLP blocks (attention_config: gmlp or amlp)": ("sgu.", "input_linear."),
}


def others(found: Found[object], units: list[Unit], names: set[str], contents: Contents) -> list[Finding]:
    """Report each unsupported kind of block, at its first tensor.

    Args:
        found: the checkpoint's files.
        units: the units of the declaration.
        names: names of all tensors, without the numbers of their layers.
        contents: contents of the files.
    """
    findings = []
    for kind, beginnings in _BEGINNINGS.items():
        ends = tuple(name for name in names if name.startswith(beginnings))
        if not ends:
            continue
        tensors = ((unit, ".".join(t["path"])) for unit in units for t in contents.tensors(unit.file))
        unit, tensor = next((unit, name) for unit, name in tensors if name.endswith(ends))
        findings.append(
            Finding.of(
                codes.UNSUPPORTED,
                f"GPT-NeoX with {kind} is not supported",
                severity="error",
                file=found.files[unit.file].path,
                rank=unit.rank,
                tensor=tensor,
                expected="attention and MLP in each layer",
                help="describe its tensors in your own layout",
                run=["--layout FILE.toml"],
            )
        )
    return findings
