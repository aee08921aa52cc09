"""The per-rank target: one safetensors file per tensor-parallel rank under Hugging Face names, and ``layout.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .._core import Table
from ..declared import Source
from ..placing import MULTIPLE, TP, Wanted
from .base import Bound, Completed, Target, positive
from .huggingface import HfTarget

#: ColossalAI's make_vocab_size_divisible_by: such directories follow its rule.
_VOCAB_MULTIPLE = 64


@dataclass
class TpTarget(Target):
    """Hugging Face tensors, divided as the layout's axes are."""

    whole: HfTarget
    tp: int
    multiple: int
    layout: str
    name: str = "tp-safetensors"
    names = ("tp-safetensors",)
    options = (TP, MULTIPLE)
    takes_any_head = True

    @classmethod
    def of(cls, source: Source, to: str, wanted: Wanted) -> TpTarget:
        """What the source allows.

        Raises:
            FastshardError: as :meth:`.HfTarget.of`, and ``FS515`` for degrees that no run has.
        """
        positive(wanted, TP, MULTIPLE)
        tp = wanted[TP]
        whole = HfTarget.known(source, "--tp") if tp > 1 else HfTarget.of(source, to, wanted)
        return cls(whole, tp, wanted[MULTIPLE] or _VOCAB_MULTIPLE, whole.layout)

    @property
    def keeps_names(self) -> bool:
        """True where no table says what the names mean, so that they stay, and the model's config with them."""
        return self.whole.keeps_names

    def request(self, table: Table | None) -> dict[str, Any]:
        """The target's side of the core's request."""
        multiple = self.multiple * self.tp
        return {
            **self.whole.request(table), "name": self.name, "degrees": {"tp": self.tp}, "pad_multiple": multiple,
        }  # fmt: skip

    def complete(self, bound: Bound) -> Completed:
        """One file per rank; ``layout.json`` says how each tensor is divided."""
        _, texts, findings = self.whole.complete(bound)
        names = sorted(bound.shapes)
        files = [
            {
                "name": f"tp_rank_{rank:02d}.safetensors",
                "coords": {"tp": rank},
                "content": {"safetensors": [[name, name] for name in names]},
            }
            for rank in range(self.tp)
        ]
        whole = bound.whole()
        divided = {
            name: next(
                (d for d, (n, all_) in enumerate(zip(shape, whole[name], strict=True)) if n != all_), None
            )
            for name, shape in bound.shapes.items()
        }
        layout: dict[str, Any] = {"tp": self.tp}
        if "V" in bound.axes:
            multiple = self.multiple * self.tp
            layout |= {
                "vocab_size": bound.axes["V"],
                "padded_vocab_size": -(-bound.axes["V"] // multiple) * multiple,
                "make_vocab_size_divisible_by": self.multiple,
            }
        layout["tp_dim"] = {name: divided[name] for name in names}
        texts["layout.json"] = json.dumps(layout, indent=1) + "\n"
        return files, texts, findings
