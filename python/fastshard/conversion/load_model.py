"""Loading of a checkpoint of any framework into a model of transformers, without writing files."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import TYPE_CHECKING, Any

from ..checkpoint.tensor_slice import Slice
from ..common import codes, safe_files
from ..common.dtypes import TORCH_FLOATS, item_size
from ..common.errors import FastshardError
from ..evaluation.layerwise_model import hide_progress
from ..models.config_json import for_construction
from .in_memory import View
from .open import open as open_checkpoint

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..checkpoint.checkpoint import Checkpoint
    from ..common.options import Loading, StrPath
    from ..common.progress import Report

__all__ = ["load_model", "open_view"]


def load_model(
    *paths: StrPath | Checkpoint | View,
    device: Any = None,
    verify: bool = True,
    progress: Report = False,
    memory: str | int | None = None,
    **options: Unpack[Loading],
) -> Any:
    """Loads a checkpoint into a model of transformers and writes no file.

    Tensors are converted as they are loaded.

    The config names the class. The weights get the dtype in which most of them are stored, as with
    ``from_pretrained(dtype="auto")``; wider ones are rounded, with a warning. Code next to a checkpoint is
    never run.

    Args:
        paths: as for :func:`fastshard.open`; or a view from ``fastshard.open(..., to="hf")``.
        device: device of the weights; default the CPU.
        verify: first read everything once, with all checks of a conversion (:meth:`View.verify`).
        progress: progress of this verification, as for :func:`fastshard.convert`.
        memory: memory limit of this verification, as for :func:`fastshard.convert`.
        options: as for :func:`fastshard.open` with a target.

    Returns:
        The model, in evaluation mode.

    Raises:
        FastshardError: as :func:`fastshard.open` and :meth:`View.verify`; ``FS514`` for a model that this
            version of transformers does not have or that needs its own code; ``FS102`` or ``FS108`` if a
            tensor of the model is missing, or is unexpected.
        ImportError: without transformers and torch.

    Examples:
        >>> model = fastshard.load_model("run", vocab_size=500)
        >>> type(model).__name__, model.num_parameters()
        ('GPTNeoXForCausalLM', 70176)
    """
    import torch
    import transformers

    view = open_view(paths, options)
    if verify and not view.verified:
        view.verify(progress=progress, memory=memory)
    given = view.config
    if given is None:
        raise FastshardError.of(
            codes.FACT_UNKNOWN, "no config.json states which model it is", help="pass the config with config="
        )
    kind = _class(transformers, given)
    _tell_of_rounding(view)
    config = kind.config_class.from_dict(for_construction(given))
    slices = {name: Slice(tensor) for name, tensor in view.items()}
    version = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    with hide_progress() if progress is False else contextlib.nullcontext():
        model, info = kind.from_pretrained(
            None,
            config=config,
            # Version 5 reads each tensor when it has a place for it.
            state_dict=slices if version >= (5,) else dict(view.torch()),
            output_loading_info=True,
            **{
                "dtype" if version >= (4, 56) else "torch_dtype": getattr(
                    torch, view.plan.main_dtype or "float32"
                )
            },
        )
    _judge(info)
    if "generation_config.json" in view.companions:
        generation_config = safe_files.read_object(
            view.companions["generation_config.json"], safe_files.MAX_CONFIG
        )
        model.generation_config = transformers.GenerationConfig.from_dict(generation_config)
    return (model if device is None else model.to(device)).eval()


def open_view(paths: tuple[Any, ...], options: Any) -> View:
    """Open checkpoints as a view for Hugging Face; a view is returned as it is.

    Raises:
        FastshardError: as :func:`fastshard.open`; ``FS515`` for a view with options, or of another target.
    """
    if len(paths) == 1 and isinstance(paths[0], View):
        if options or paths[0].plan.target != "hf":
            raise FastshardError.of(
                codes.USAGE,
                "the options of a view are fixed when it is opened",
                expected='a view opened with to="hf", and no options',
            )
        return paths[0]
    return open_checkpoint(*paths, to="hf", **options)


def _class(transformers: Any, config: dict[str, Any]) -> Any:
    """Return the class that a config names.

    Raises:
        FastshardError: ``FS514`` if transformers has no such class.
    """
    names = config.get("architectures") or []
    kind = getattr(transformers, str(names[0]), None) if names else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"transformers {transformers.__version__} has no model class of this name",
            expected="a class of transformers; code next to a checkpoint is never run",
            got=", ".join(map(str, names)) or "no architectures in config.json",
            help='load the tensors into the model yourself: fastshard.open(..., to="hf").torch()',
        )
    return kind


def _tell_of_rounding(view: View) -> None:
    """Warn of tensors that are stored in a wider dtype than the model's."""
    sizes = {dtype: item_size(dtype) for dtype in TORCH_FLOATS}
    main = next((size for dtype, size in sizes.items() if TORCH_FLOATS[dtype] == view.plan.main_dtype), 8)
    wider = [name for name, tensor in view.items() if sizes.get(tensor.dtype, 0) > main]
    if wider:
        warnings.warn(
            f"{len(wider)} tensors ({wider[0]}, ...) are stored with a wider dtype than "
            f'{view.plan.main_dtype} and are rounded to it; fastshard.open(..., to="hf").torch() keeps them '
            "unchanged",
            stacklevel=3,
        )


def _judge(info: dict[str, Any]) -> None:
    """Refuse a model whose tensors differ from the checkpoint's, because missing weights would be random.

    Raises:
        FastshardError: ``FS102``, ``FS108`` or ``FS201``.
    """
    for key, code, message in (
        (
            "missing_keys",
            codes.MISSING_TENSOR,
            "the model needs this tensor, and the checkpoint lacks it",
        ),
        ("unexpected_keys", codes.UNEXPECTED_FILE, "the model has no such tensor"),
        ("mismatched_keys", codes.SHAPE, "the model has another shape for this tensor"),
        ("error_msgs", codes.UNSUPPORTED, "transformers could not load the tensor"),
    ):
        found = sorted(str(name) for name in info.get(key) or ())
        if found:
            raise FastshardError.of(
                code, f"{message}; this affects {len(found)} tensors", tensor=found[0], severity="error"
            )
