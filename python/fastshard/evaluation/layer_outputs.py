"""Outputs of a model's layers on some tokens, from a checkpoint or from a trainer's record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import codes, safe_files
from ..common.errors import FastshardError
from ..common.option_checks import refused
from ..common.options import StrPath
from ..common.records import dataclass
from .layerwise_model import LayerwiseModel, Unit

if TYPE_CHECKING:
    import torch

__all__ = ["LayerOutputs", "is_record", "read_record", "record"]

#: Names of units that are not layers.
EMBEDDING, HEAD, LOGITS = "input_embedding", "head", "logits"
#: Marks a file as a record, in the metadata of its header.
_MARK = "fastshard.record"
_VERSION = "1"
_ENDING = ".safetensors"


@dataclass(frozen=True)
class LayerOutputs:
    """The outputs of a model's units on the same tokens."""

    #: Token ids, of shape (sequences, length).
    tokens: torch.Tensor
    #: Outputs of shape (sequences, length, width), by name: ``layers.0``, ``input_embedding``, ``head``, and
    #: the paths of other modules. In a trainer's record, ``input_embedding`` is the input of the first layer.
    outputs: dict[str, torch.Tensor]
    #: Origin of the outputs, for messages.
    origin: str
    #: The class of the model, and the dtype of the computation.
    model_class: str
    dtype: str
    #: True for a trainer's record, which another implementation computed.
    is_record: bool = False


class Namer:
    """The names of a run's outputs; a unit that runs several times gets a number after its name."""

    def __init__(self, model: LayerwiseModel) -> None:
        self._layers = {id(unit): at for at, unit in enumerate(model.layers)}
        self._roles = {
            id(model.model.get_input_embeddings()): EMBEDDING,
            id(model.model.get_output_embeddings()): HEAD,
        }
        self._calls: Counter[int] = Counter()

    def name(self, unit: Unit) -> str:
        """Return the name of a unit."""
        if (at := self._layers.get(id(unit))) is not None:
            return f"layers.{at}"
        return self._roles.get(id(unit.module), unit.path)

    def next(self, unit: Unit) -> str:
        """Return the name of a unit's next output."""
        self._calls[id(unit)] += 1
        calls = self._calls[id(unit)]
        return self.name(unit) if calls == 1 else f"{self.name(unit)} (run {calls})"


def run(model: LayerwiseModel, tokens: torch.Tensor, origin: str, on_load: Any = None) -> LayerOutputs:
    """Run a checkpoint's model and keep the output of each unit."""
    outputs: dict[str, torch.Tensor] = {}
    names = Namer(model)

    def keep(unit: Unit, output: torch.Tensor) -> None:
        # Modules change hidden states in place.
        outputs[names.next(unit)] = output.detach().to("cpu", copy=True)

    logits = model.run(tokens, on_load=on_load, on_output=keep)
    outputs[LOGITS] = logits.to("cpu")
    return LayerOutputs(tokens, outputs, origin, model.class_name, _dtype_name(model.dtype))


def record(
    model: Any, tokens: Any, path: StrPath, *, layers: Sequence[Any] | None = None, **inputs: Any
) -> None:
    """Records the outputs of a trainer's model, for ``fastshard layers RECORD CHECKPOINT``.

    The model runs once, without gradients and in evaluation mode, on one process. If its tensors are divided
    over ranks, it must gather them itself, or be recorded with one rank. The file contains the input of the
    first layer, the output of each layer, the logits, all in the dtype of the computation, and the loss.

    Args:
        model: a torch module that is called with the tokens and returns logits, an object with an attribute
            ``logits``, or a tuple that starts with them.
        tokens: token ids of shape (sequences, length); the two numbers must differ, because they identify the
            dimensions of an output (Megatron and GPT-NeoX put the length first).
        path: the file to write, in the format of safetensors.
        layers: the decoder layers in order; default: the longest ModuleList or Sequential whose modules all
            have the same class.
        inputs: further arguments for the call of the model, e.g. ``position_ids`` and ``attention_mask``.

    Raises:
        FastshardError: ``FS515`` if the layers cannot be found, or the outputs do not have the tokens' shape;
            ``FS504`` if the file exists and is not a record, ``FS501`` if its folder is missing.

    Examples:
        >>> from fastshard.integrations import record
        >>> tokens = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
        >>> model = fastshard.load_model("model")  # in a training script, its own model
        >>> record(model, tokens, "outputs.safetensors")
        >>> fastshard.layers("outputs.safetensors", "edited").differing
        ['logits']
    """
    import torch
    from safetensors.torch import save_file

    file = _check_place(path)
    ids = torch.as_tensor(tokens)
    if ids.dim() != 2 or ids.shape[0] == ids.shape[1]:
        raise FastshardError.of(
            codes.USAGE,
            "tokens",
            expected="different numbers of sequences and of tokens per sequence",
            got=str(tuple(ids.shape)),
        )
    chosen = list(layers) if layers is not None else _find_layers(model)
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, value: Any) -> None:
        first = value[0] if isinstance(value, (tuple, list)) else value
        outputs.setdefault(name, _order(first, ids, name))

    def keep_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(EMBEDDING, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    hooks = [chosen[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
    hooks += [
        layer.register_forward_hook(lambda module, args, output, at=at: keep(f"layers.{at}", output))
        for at, layer in enumerate(chosen)
    ]
    was_training = model.training
    try:
        with torch.no_grad():
            result = model.eval()(ids.to(next(model.parameters()).device), **inputs)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    result = getattr(result, "logits", result)
    keep(LOGITS, result)
    missing = [f"layers.{at}" for at in range(len(chosen)) if f"layers.{at}" not in outputs]
    if missing:
        raise FastshardError.of(
            codes.USAGE, f"{missing[0]} of {len(chosen)} layers did not run", help="pass layers"
        )
    logits = outputs[LOGITS].float()
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(torch.int64)
    )
    document = {
        "version": _VERSION,
        "class": type(model).__name__,
        "layers": len(chosen),
        "loss": float(loss),
        "dtype": _dtype_name(outputs["layers.0"].dtype),
    }
    save_file(
        {"tokens": ids.to(torch.int64).contiguous(), **outputs},
        str(file),
        metadata={_MARK: json.dumps(document)},
    )


def _check_place(path: StrPath) -> Path:
    """Return the path at which to write a record, with links followed.

    Raises:
        FastshardError: as :func:`record`.
    """
    if not str(path).endswith(_ENDING):
        raise refused("path", f"a name that ends with {_ENDING}", str(path))
    file = safe_files.replaceable(path)
    if file.exists() and not is_record(path):
        raise FastshardError.of(
            codes.OUT_EXISTS, "exists and is not a record", file=str(path), help="choose another name"
        )
    return file


def is_record(path: Any) -> bool:
    """Return True if a path names a file that :func:`record` has written."""
    if not isinstance(path, (str, Path)) or not str(path).endswith(_ENDING) or not Path(path).is_file():
        return False
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return _MARK in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def read_record(path: StrPath) -> LayerOutputs:
    """Read a file that :func:`record` has written.

    Raises:
        FastshardError: ``FS211`` if it is damaged, or has another version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            document = json.loads(file.metadata()[_MARK])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}")
        tokens, count = tensors.pop("tokens"), int(document["layers"])
        needed = chain([EMBEDDING, LOGITS], (f"layers.{at}" for at in range(count)))
        if (absent := next((name for name in needed if name not in tensors), None)) is not None:
            raise ValueError(f"without {absent}")
        if str(tokens.dtype) != "torch.int64" or not tokens.numel() or int(tokens.min()) < 0:
            raise ValueError("its tokens are not ids")
        if no_float := [name for name, tensor in tensors.items() if not tensor.dtype.is_floating_point]:
            raise ValueError(f"{no_float[0]} is not an output")
        if tensors[LOGITS].shape[-1] <= int(tokens.max()):
            raise ValueError("its logits are for another vocabulary than its tokens")
        fits = {n: t.dim() == 3 and t.shape[:2] == tokens.shape and t.numel() for n, t in tensors.items()}
        wrong = next((name for name, is_fit in fits.items() if not is_fit), None)
        if wrong is not None:
            raise ValueError(f"{wrong} has another shape than the tokens")
    except (
        SafetensorError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise FastshardError.of(
            codes.BAD_VALUE,
            f"the record of a trainer's layers cannot be read: {error}",
            file=str(path),
            help="make the record again with this version of fastshard",
        ) from None
    return LayerOutputs(
        tokens, tensors, str(path), str(document["class"]), str(document["dtype"]), is_record=True
    )


def _find_layers(model: Any) -> list[Any]:
    """Find the decoder layers of a model: the longest list of modules of the same class.

    Raises:
        FastshardError: ``FS515`` if there is none.
    """
    import torch

    best: list[Any] = []
    for module in model.modules():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            kinds = Counter(type(inner) for inner in module)
            kind = kinds.most_common(1)[0][0] if kinds else None
            layers = [inner for inner in module if type(inner) is kind]
            if len(layers) > len(best) and any(True for inner in layers for _ in inner.parameters()):
                best = layers
    if not best:
        raise FastshardError.of(codes.USAGE, "the model has no list of layers", help="pass layers")
    return best


def _order(output: Any, tokens: torch.Tensor, name: str) -> torch.Tensor:
    """Return an output as (sequences, length, width), on the CPU.

    Raises:
        FastshardError: ``FS515`` for another shape.
    """
    rows, length = tokens.shape
    shape = tuple(getattr(output, "shape", ()))
    if len(shape) == 3 and shape[:2] == (length, rows):
        output = output.transpose(0, 1)
    elif len(shape) != 3 or shape[:2] != (rows, length):
        raise FastshardError.of(
            codes.USAGE,
            f"the output of {name} does not have the shape of the tokens",
            expected=f"({rows}, {length}, width) or ({length}, {rows}, width)",
            got=str(shape),
        )
    ordered: torch.Tensor = output.detach().to("cpu", copy=True).contiguous()
    return ordered


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
