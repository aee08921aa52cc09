"""The per-rank target: one safetensors file per tensor-parallel rank under Hugging Face names, and
``layout.json``.
"""

from __future__ import annotations

from typing import Any

from .. import _core
from ..common import codes, json_text
from ..common.errors import FastshardError
from ..common.records import dataclass, replace
from ..common.target_options import MULTIPLE, TP
from ..layouts.declaration import Source
from .base import Bound, Completed, Drafted, Target, padded_rows, positive
from .form import Form
from .huggingface import HfTarget
from .request import Request

#: ColossalAI's make_vocab_size_divisible_by. Such directories use ColossalAI's rule.
_VOCAB_MULTIPLE = 64


@dataclass
class TpTarget(Target):
    """A target with Hugging Face tensors that are divided along the layout's axes."""

    whole: HfTarget
    tp: int
    multiple: int
    name: str = "tp-safetensors"
    names = ("tp-safetensors",)
    options = (TP, MULTIPLE)
    takes_any_head = True

    @classmethod
    def of(cls, source: Source, request: Request) -> TpTarget:
        """Make the target for a source.

        Raises:
            FastshardError: as :meth:`.HfTarget.of`, and ``FS515`` for impossible degrees.
        """
        positive(request, TP, MULTIPLE)
        tp = request[TP]
        whole = HfTarget.known(source, "--tp") if tp > 1 else HfTarget.of(source)
        return cls(whole, tp, request[MULTIPLE] or _VOCAB_MULTIPLE)

    @property
    def keeps_names(self) -> bool:
        """True if no table describes the names, so that they and the model's config stay unchanged."""
        return self.whole.keeps_names

    def form(self) -> Form:
        """Return the form of the result."""
        padded = self.multiple * self.tp
        return replace(self.whole.form(), name=self.name, degrees={"tp": self.tp}, pad_multiple=padded)

    def complete(self, bound: Bound) -> Completed:
        """Return one file per rank, and ``layout.json``, which states how each tensor is divided."""
        whole = self.whole.complete(bound)
        names = sorted(bound.tensors)
        files: list[_core.PlacedFile] = [
            {
                "name": f"tp_rank_{rank:02d}.safetensors",
                "coords": {"tp": rank},
                "content": {"safetensors": [[name, name] for name in names]},
            }
            for rank in range(self.tp)
        ]
        layout: dict[str, Any] = {"tp": self.tp}
        if "V" in bound.axes:
            layout |= {
                "vocab_size": bound.axes["V"],
                "padded_vocab_size": padded_rows(bound.axes, self.multiple * self.tp),
                "make_vocab_size_divisible_by": self.multiple,
            }
        layout["tp_dim"] = {name: _divided(name, bound.tensors[name]) for name in names}
        texts = {**whole.texts, "layout.json": json_text.indented(layout)}
        return Completed(texts, whole.findings, files)


def _divided(name: str, tensor: Drafted) -> int | dict[str, Any] | None:
    """Return a tensor's division for ``layout.json``: a dimension, or a dimension and the parts of a fused
    tensor.

    Raises:
        FastshardError: ``FS514`` if the ranks' shards are not equal.
    """
    if tensor.cuts is None or len(tensor.cuts) > 1:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "layout.json cannot describe how ranks divide this tensor",
            tensor=name,
            help="leave out --tp",
        )
    for dim, _, parts in tensor.cuts:
        return dim if len(parts) == 1 else {"dim": dim, "parts": parts}
    return None
