"""The targets of a conversion, by their names in ``--to``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from ..common import codes, plugins
from ..common.errors import FastshardError
from ..common.near_words import meant
from ..common.plugins import explain_failure, find_plugins, load_plugin
from ..layouts.declaration import Source
from .request import Request

if TYPE_CHECKING:
    from .base import Target

__all__ = ["TARGETS", "check", "keeps_all", "target_of"]

#: Module and class of each target, with its names in ``--to``.
_PLACES: dict[tuple[str, str], tuple[str, ...]] = {
    ("huggingface", "HfTarget"): ("hf",),
    ("gpt_neox", "NeoxTarget"): ("gpt_neox", "gpt_neox:pipeline", "gpt_neox:sequential"),
    ("megatron", "MegatronTarget"): (
        "megatron",
        "megatron:legacy",
        "megatron:legacy-local",
        "megatron:torch_dist",
        "megatron:torch_dist-local",
    ),
    ("tp_safetensors", "TpTarget"): ("tp-safetensors",),
    ("dcp", "DcpTarget"): ("dcp", "dcp:torchtitan", "dcp:olmo_core"),
    ("deepspeed_universal", "UniversalTarget"): ("universal",),
    ("maxtext_orbax", "MaxTextStore"): ("maxtext", "maxtext:scan", "maxtext:unscan"),
    ("orbax", "OrbaxTarget"): ("orbax",),
}


def _list_installed() -> dict[str, str]:
    """List the targets of installed packages; empty if entry points cannot be read, which adapters report."""
    try:
        return find_plugins(plugins.TARGETS)
    except FastshardError:
        return {}


def _load_installed(name: str) -> type[Target]:
    from .base import Target

    with explain_failure(plugins.TARGETS, name):
        loaded = load_plugin(plugins.TARGETS, name)
        if not (isinstance(loaded, type) and issubclass(loaded, Target)):
            raise TypeError("it is not a Target")
        return loaded


class _Targets(Mapping[str, "type[Target]"]):
    """Targets by their ``--to`` names, in the order of the help text. Each is loaded on first use."""

    _places: ClassVar = {name: place for place, names in _PLACES.items() for name in names}

    def __getitem__(self, name: str) -> type[Target]:
        if name not in self._places:
            if name not in _list_installed():
                raise KeyError(name)
            return _load_installed(name)
        module, target = self._places[name]
        found: type[Target] = getattr(import_module(f".{module}", __package__), target)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in _list_installed()

    def __iter__(self) -> Iterator[str]:
        return iter({**self._places, **_list_installed()})

    def __len__(self) -> int:
        return len({**self._places, **_list_installed()})


#: Available targets.
TARGETS = _Targets()


#: Aliases of targets.
_ALSO_CALLED = {
    "huggingface": "hf",
    "hugging-face": "hf",
    "transformers": "hf",
    "safetensors": "hf",
    "megatron-lm": "megatron",
    "nemo": "megatron",
    "neox": "gpt_neox",
    "gpt-neox": "gpt_neox",
    "fsdp": "dcp",
    "fsdp2": "dcp",
    "hf_hub": "hf",
    "nemo2": "megatron",
    "torch_dist": "megatron:torch_dist",
    "deepspeed": "universal",
    "zero": "universal",
}
_TORCH_SAVE = (
    "fastshard does not write torch.save files; --to hf writes safetensors, --to dcp writes torch's "
    "distributed format"
)
#: Formats that users ask for and that need one more step after ``--to hf``, each with that step.
_AFTER_HF = {
    "gguf": "llama.cpp's convert_hf_to_gguf.py makes GGUF files from the output of --to hf",
    "llama.cpp": "llama.cpp's convert_hf_to_gguf.py makes GGUF files from the output of --to hf",
    "ollama": "Ollama imports the output of --to hf",
    "vllm": "vLLM loads the output of --to hf",
    "sglang": "SGLang loads the output of --to hf",
    "tgi": "Text Generation Inference loads the output of --to hf",
    "tensorrt-llm": "TensorRT-LLM reads the output of --to hf",
    "trtllm": "TensorRT-LLM reads the output of --to hf",
    "mlx": "mlx_lm.convert reads the output of --to hf",
    "onnx": "optimum-cli exports the output of --to hf",
    "hub": "--to hf writes a model for the Hub; OUT may be hf://org/name",
    **dict.fromkeys(("pytorch", "torch", "pt", "pth", "bin", "ckpt"), _TORCH_SAVE),
}


def keeps_all(to: str | None) -> bool:
    """Return True for a merge, and for targets that keep all names and shapes as a merge does."""
    return to is None or TARGETS[to].is_container


def check(request: Request) -> None:
    """Check that the target exists and supports these options.

    Raises:
        FastshardError: ``FS514`` for degrees and state that the target cannot write, ``FS515`` for unknown
            names and options that do not apply.
    """
    to = request.to
    if to is not None and to not in TARGETS:
        if (way := _AFTER_HF.get(str(to).lower())) is not None:
            raise FastshardError.of(
                codes.USAGE,
                f"fastshard does not write {to}",
                expected=", ".join(TARGETS),
                help=way,
                run=["--to hf"],
            )
        known = _ALSO_CALLED.get(str(to).lower())
        near = f"; did you mean {known}?" if known else meant(str(to), [*TARGETS, *_ALSO_CALLED])
        raise FastshardError.of(codes.USAGE, f"there is no format {to}{near}", expected=", ".join(TARGETS))
    target = None if to is None else TARGETS[to]
    whole = target is None or target.is_whole
    if not whole and request.is_narrowed:
        raise FastshardError.of(
            codes.USAGE,
            f"a {to} checkpoint must be complete",
            got="--include or --exclude",
            help="narrow a merge or a conversion to hf instead",
        )
    strange = [option for option in request.list_changed() if target is None or option not in target.options]
    if whole and any(option.kind == "degree" for option in strange):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"{f'a conversion to {to}' if to else 'a merge'} writes full tensors only",
            expected=" and ".join(f"{option.name} 1" for option in strange if option.kind == "degree"),
            got=", ".join(
                f"{option.name} {request[option]}" for option in strange if option.kind == "degree"
            ),
        )
    for option in strange:
        takes = [name for name, other in TARGETS.items() if option in other.options]
        raise FastshardError.of(
            codes.USAGE,
            f"{option.departure}: {to or 'a merge'} does not take it",
            expected=f"--to {' | '.join(takes)}",
            got=f"{to or 'merge'}",
        )
    if request.optimizer and target is not None and not (target.holds_optimizer or target.is_container):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"the layout {to} cannot hold optimizer state",
            help="merge it, which keeps the state, or choose a target that can hold it (universal, dcp)",
            run=["fastshard merge CKPT OUT --optimizer", "--to dcp"],
        )


def target_of(source: Source, request: Request) -> Target:
    """Make the target for a source.

    Raises:
        FastshardError: ``FS514`` for a model that the target does not support, ``FS209`` if a fact that
            decides values is unknown, ``FS515`` for impossible degrees.
    """
    to = str(request.to)
    target, headless = TARGETS[to], source.model.headless
    if headless and not target.takes_any_head:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"architectures says {headless}, which has no output layer; {to} holds only models that have one",
            expected="a causal language model",
            got=headless,
            help="merge it, or choose the target hf: both keep it unchanged",
            run=["fastshard merge CKPT OUT", "--to hf"],
        )
    return target.of(source, request)
