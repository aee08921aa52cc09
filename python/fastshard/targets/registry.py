"""The layouts that a conversion can make, by the names of ``--to``."""

from __future__ import annotations

from dataclasses import dataclass

from ..declared import Source
from ..errors import FastshardError
from ..options import meant
from .base import Target
from .dcp import DcpTarget
from .gpt_neox import NeoxTarget
from .huggingface import HfTarget
from .maxtext import MaxTextTarget
from .maxtext_store import MaxTextStore
from .megatron import MegatronTarget
from .orbax import OrbaxTarget
from .tp_ranks import TpTarget

__all__ = ["KEEPING", "TARGETS", "Wanted", "check", "target_of"]

#: Targets that are written.
TARGETS = (
    "hf", "gpt_neox", "gpt_neox:pipeline", "gpt_neox:sequential", "megatron", "megatron:legacy",
    "megatron:legacy-local", "megatron:torch_dist", "tp-safetensors", "dcp", "maxtext", "maxtext:scan", "maxtext:unscan", "orbax",
)  # fmt: skip
#: Targets that keep the names and shapes of the source: a merge in another container.
KEEPING = ("orbax",)
#: Targets that hold whole tensors.
_WHOLE = ("hf", "orbax", "maxtext", "maxtext:scan", "maxtext:unscan")
#: Targets that take a model whatever its head is.
_ANY_HEAD = ("hf", "orbax", "dcp", "tp-safetensors")


@dataclass(frozen=True)
class Wanted:
    """What the caller asks of a target."""

    tp: int = 1
    pp: int = 1
    vocab_multiple: int | None = None
    #: Plain zarr v2 instead of OCDBT and zarr v3.
    zarr2: bool = False
    #: The optimizer's state too, where the target holds it.
    optimizer: bool = False
    #: Options of MaxText, by their names there.
    param_scan_axis: int | None = None
    fused_qkv: bool | None = None
    rope_type: str | None = None


def check(to: str | None, tp: int, pp: int, narrowed: bool) -> None:
    """Whether there is such a target, and whether it takes these options.

    Raises:
        FastshardError: ``FS514`` for targets and degrees that are not written, ``FS515`` for names
            that nobody knows and options that do not fit.
    """
    if to is not None and to not in TARGETS:
        raise FastshardError.of(
            "FS515", f"target{meant(str(to), TARGETS)}", expected=" | ".join(TARGETS), got=repr(to)
        )
    whole = to is None or to in _WHOLE
    if not whole and narrowed:
        raise FastshardError.of(
            "FS515",
            f"a {to} checkpoint is written whole",
            got="--include or --exclude",
            help="narrow a merge or a conversion to hf instead",
        )
    if whole and (tp != 1 or pp != 1):
        raise FastshardError.of(
            "FS514",
            f"{f'a conversion to {to}' if to else 'a merge'} writes whole tensors only",
            expected="tp 1, pp 1",
            got=f"tp {tp}, pp {pp}",
        )


def target_of(source: Source, to: str, wanted: Wanted) -> Target:
    """The target for a source.

    Raises:
        FastshardError: ``FS514`` for a model that the target does not have, ``FS209`` if a fact that
            decides values is unknown, ``FS515`` for degrees that no run has.
    """
    tp, pp, vocab_multiple = wanted.tp, wanted.pp, wanted.vocab_multiple
    maxtext = to.startswith("maxtext")
    if wanted.zarr2 and not maxtext and to != "orbax":
        raise FastshardError.of(
            "FS515", f"--zarr2: {to} is no store of arrays", expected="--to orbax or maxtext", got=to
        )
    options = {n: getattr(wanted, n) for n in ("param_scan_axis", "fused_qkv", "rope_type")}
    if not maxtext and (stray := next((n for n, value in options.items() if value is not None), None)):
        raise FastshardError.of(
            "FS515", f"--{stray.replace('_', '-')}: an option of MaxText", expected="--to maxtext", got=to
        )
    if source.headless and to not in _ANY_HEAD:
        raise FastshardError.of(
            "FS514",
            f"architectures says {source.headless}, which has no output layer; {to} holds models that have one",
            expected="a causal language model",
            got=source.headless,
            help="`fastshard merge`, or --to hf, keeps it as it is",
        )
    if to == "orbax":
        return OrbaxTarget.of(source, wanted.zarr2)
    if to == "hf":
        return HfTarget.of(source)
    if to == "tp-safetensors":
        return TpTarget.of(source, tp, pp, vocab_multiple)
    if to == "dcp":
        return DcpTarget.of(source, tp, pp)
    if maxtext:
        target = MaxTextTarget.of(source, to, optimizer=wanted.optimizer, multiple=vocab_multiple, **options)
        return MaxTextStore(target, OrbaxTarget.of(source, wanted.zarr2), to)
    if to.startswith("megatron"):
        return MegatronTarget.of(source, to, tp, pp, vocab_multiple)
    return NeoxTarget.of(source, to, tp, pp, vocab_multiple)
