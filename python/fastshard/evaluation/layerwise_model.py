"""A causal language model of transformers that reads its weights from a checkpoint while it runs, one decoder
layer at a time.

Parameters are on torch's meta device until their unit runs. A unit is a decoder layer, or a module outside
the layers with its own tensors. transformers' own loader fills a unit, so that renamings, stacked experts and
dtypes are the same as with ``from_pretrained``. Nothing is written.

source: transformers 5.24 core_model_loading.py (convert_and_load_state_dict_in_model), modeling_utils.py
    (from_pretrained, tie_weights)
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint.tensor import ALIGNMENT
from ..checkpoint.tensor_slice import Slice
from ..common import codes
from ..common.errors import FastshardError
from ..common.formatting import human_memory
from ..common.records import dataclass, field
from ..models.config_json import for_construction

if TYPE_CHECKING:
    import torch

    from ..checkpoint.planned_view import PlannedView

__all__ = ["LayerwiseModel", "Unit", "hide_progress"]

#: Called with a unit and a tensor; may return a replacement for the tensor.
Watch = Callable[["Unit", Any], Any]

#: The first version of transformers whose loader accepts tensors one by one.
_OLDEST = (5, 0)
#: Approximate memory of a layer's forward pass, without weights, in vectors of ``hidden_size`` floats per
#: token.
_ACTIVATIONS = 16


@dataclass
class Unit:
    """A module whose weights are loaded and released together."""

    #: Dotted path of the module in the model; empty for the model itself.
    path: str
    module: Any
    #: Placeholder tensors of the module while its weights are released, by their names in the module.
    released: dict[str, torch.Tensor]
    #: Names of the checkpoint's tensors for this unit.
    stored: list[str] = field(default_factory=list)
    #: True for a unit that stays loaded: the input embedding, and weights to which other units are tied.
    stays: bool = False

    @property
    def names(self) -> set[str]:
        """Names in the model of the tensors that loading the unit fills."""
        return {f"{self.path}.{name}" if self.path else name for name in self.released}

    @property
    def nbytes(self) -> int:
        """Size of its weights in bytes, in the dtype of the model."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.released.values())


class LayerwiseModel:
    """A model whose units are loaded from a view before they run, and released afterwards.

    Args:
        view: the tensors under Hugging Face names: ``fastshard.open(..., to="hf")``.
        device: the device that computes.

    Raises:
        FastshardError: ``FS514`` for a model that is not a causal language model of the installed
            transformers, or if this version cannot load tensors one by one; ``FS102`` or ``FS108`` if a
            tensor of the model is missing, or is unexpected; ``FS201`` for a wrong shape; ``FS515`` for a
            device that does not exist.
    """

    def __init__(self, view: PlannedView, device: str = "cpu") -> None:
        import torch

        self._loading = _import_loading()
        self.view = view
        self.device = _choose_device(device)
        self.config = _find_config(view)
        self.class_name = _find_class_name(self.config)
        self.dtype: torch.dtype = getattr(torch, view.plan.main_dtype or "float32")
        self.model = _build(self.class_name, self.config, self.dtype)
        self.units = self._divide()
        self._on_load: Callable[[int], object] = lambda nbytes: None
        self._attach()

    @property
    def vocab_size(self) -> int:
        """Number of rows of the input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens in a sequence according to the config; None if it states none."""
        text = self.model.config.get_text_config()
        lengths = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions"))
        return next((number for number in lengths if isinstance(number, int) and number > 0), None)

    @property
    def layers(self) -> list[Unit]:
        """Units that are decoder layers, in their order."""
        names = set(self.model._no_split_modules or ())
        return [unit for unit in self.units if type(unit.module).__name__ in names]

    @property
    def nbytes(self) -> int:
        """Size in bytes of all weights that a run loads."""
        return sum(unit.nbytes for unit in self.units)

    def estimate_memory(self, tokens: int, *, keeps_outputs: bool = False) -> int:
        """Estimate the peak anonymous memory of a run in bytes, for a number of tokens in a batch.

        Args:
            tokens: number of tokens.
            keeps_outputs: True if the caller keeps the outputs of all units.
        """
        resident = sum(unit.nbytes for unit in self.units if unit.stays)
        # The loader holds a unit's stored tensors and what it makes of them: stacked experts, another dtype.
        largest = max((unit.nbytes for unit in self.units if not unit.stays), default=0)
        text = self.model.config.get_text_config()
        width = int(getattr(text, "hidden_size", 0) or 0)
        logits = self.vocab_size * (self.dtype.itemsize + 4)
        outputs = len(self.units) * width * self.dtype.itemsize if keeps_outputs else 0
        needed = logits + outputs + 4 * width * _ACTIVATIONS
        return _core.anonymous_memory() + resident + 2 * largest + tokens * needed

    def check_memory(self, limit: int | None, tokens: int, *, keeps_outputs: bool = False) -> None:
        """Refuse a run whose memory would exceed a limit in bytes; None means no limit.

        Raises:
            FastshardError: ``FS512``.
        """
        need = self.estimate_memory(tokens, keeps_outputs=keeps_outputs)
        if limit is None or need <= limit:
            return
        largest = max(self.units, key=lambda unit: unit.nbytes)
        raise FastshardError.of(
            codes.MEMORY_BUDGET,
            f"the largest unit of the model, {largest.path}, has {human_memory(largest.nbytes)}; loading it "
            "needs about twice as much memory",
            expected=f"about {-(-need >> 20)} MiB for {tokens} tokens",
            got=f"{limit >> 20} MiB",
            help="allow more memory, or use fewer tokens",
            run=[f"--memory {-(-need >> 20)}MiB"],
        )

    def run(
        self,
        tokens: torch.Tensor,
        *,
        on_load: Callable[[int], object] | None = None,
        on_input: Watch | None = None,
        on_output: Watch | None = None,
    ) -> torch.Tensor:
        """Run the model once and return the logits, of shape (sequences, length, vocabulary).

        Args:
            tokens: token ids of shape (sequences, length).
            on_load: called with the size in bytes of each unit after it was loaded.
            on_input: called with each unit and its hidden states before it runs; a returned tensor replaces
                them.
            on_output: called with each unit and its output after it ran; a returned tensor replaces it.

        Raises:
            FastshardError: if a tensor cannot be read, or does not fit the model.
        """
        import torch

        self._on_load = on_load or (lambda nbytes: None)
        with contextlib.ExitStack() as stack, torch.no_grad():
            for unit in self.units:
                if on_input is not None:
                    hook = unit.module.register_forward_pre_hook(
                        _pass_input(unit, on_input), with_kwargs=True
                    )
                    stack.callback(hook.remove)
                if on_output is not None:
                    hook = unit.module.register_forward_hook(_pass_output(unit, on_output))
                    stack.callback(hook.remove)
            logits: torch.Tensor = self._forward(tokens.to(self.device))
        if logits.is_meta:
            raise _refuse_run(self.class_name, "its logits are on the meta device")
        return logits

    def release(self) -> None:
        """Release the weights of all units; the model cannot run afterwards.

        The model and its hooks refer to each other, so only the garbage collector would free them, much
        later.
        """
        for unit in self.units:
            unit.module.load_state_dict(unit.released, strict=False, assign=True)
        for name in self._ties:
            parent, _, own = name.rpartition(".")
            setattr(self.model.get_submodule(parent), own, None)

    def _forward(self, ids: torch.Tensor) -> Any:
        """Run the forward pass, and convert exceptions of torch and transformers into a finding.

        Raises:
            FastshardError: ``FS512`` if memory runs out; ``FS514`` for any other exception of a module.
        """
        import torch

        try:
            return self.model(input_ids=ids, use_cache=False).logits
        except FastshardError:
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise FastshardError.of(
                codes.MEMORY_BUDGET,
                f"not enough memory for {ids.numel()} tokens: {error}",
                help="use fewer tokens",
            ) from error
        except Exception as error:
            # Each of a hundred classes raises errors of its own.
            raise _refuse_run(self.class_name, f"{type(error).__name__}: {error}") from error

    def _divide(self) -> list[Unit]:
        """Divide the model into units, and assign each stored tensor to its unit.

        Raises:
            FastshardError: ``FS102`` or ``FS108``.
        """
        units = list(_list_units(self.model))
        places = self._find_places()
        ties = self._find_ties(set(places.values()))
        owner = {name: unit for unit in units for name in unit.names}
        for stored, name in places.items():
            owner[name].stored.append(stored)
        embedding = self.model.get_input_embeddings()
        for unit in units:
            unit.stays = unit.module is embedding or bool(unit.names & set(ties.values()))
            prefix = f"{unit.path}." if unit.path else ""
            unit.released = {n: t for n, t in unit.released.items() if f"{prefix}{n}" not in ties}
        self._ties = ties
        return [unit for unit in units if unit.released]

    def _find_places(self) -> dict[str, str]:
        """Find the name of each stored tensor in the model, by the rules of the loader.

        Raises:
            FastshardError: ``FS108`` for a tensor that the model does not have.
        """
        loading, model = self._loading, self.model
        mapping = loading.get_model_conversion_mapping(model)
        self._config = loading.LoadStateDictConfig(
            dtype=self.dtype,
            dtype_plan=model._get_dtype_plan(self.dtype),
            weight_mapping=mapping,
            device_map={"": self.device},
        )
        renamings = [rule for rule in mapping if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in mapping if isinstance(rule, loading.WeightConverter)]
        own, prefix = model.state_dict(), model.base_model_prefix
        ignored = _list_ignored(model)
        places: dict[str, str] = {}
        # A rule may begin to apply with an earlier name: the loader's order counts.
        for stored in sorted(self.view, key=loading.dot_natural_key):
            name, _ = loading.rename_source_key(stored, renamings, converters, prefix, own)
            if name not in own and stored in own:
                name = stored
            if name in own:
                places[stored] = name
            elif ignored is None or not ignored.search(name):
                raise FastshardError.of(
                    codes.UNEXPECTED_FILE,
                    "the model has no such tensor",
                    tensor=stored,
                    expected=f"a tensor of {self.class_name}",
                    severity="error",
                )
        return places

    def _find_ties(self, filled: set[str]) -> dict[str, str]:
        """Find a stored tensor for each tied name in the model that has none.

        Two tied tensors that are both stored are loaded separately: ``from_pretrained`` ties only equal ones.

        Raises:
            FastshardError: ``FS102`` if a tensor of the model is stored under none of its names.
        """
        groups: dict[str, set[str]] = defaultdict(set)
        for target, source in self.model.all_tied_weights_keys.items():
            groups[source] |= {source, target}
        ties: dict[str, str] = {}
        for group in groups.values():
            if holders := sorted(group & filled):
                ties |= dict.fromkeys(group - filled, holders[0])
        missing_patterns = self.model._keys_to_ignore_on_load_missing or ()
        optional = re.compile("|".join(f"({p})" for p in missing_patterns)) if missing_patterns else None
        for name in self.model.state_dict():
            # One tensor may have two names: a converter fills several names and is placed under the first.
            if name in filled or name in ties or self._is_converted(name):
                continue
            if optional is None or not optional.search(name):
                raise _missing(name)
        return ties

    def _is_converted(self, name: str) -> bool:
        """Return True if a converter with several results may fill a name without a stored tensor."""
        return any(
            len(rule.target_patterns) > 1
            for rule in self._config.weight_mapping
            if isinstance(rule, self._loading.WeightConverter)
        )

    def _attach(self) -> None:
        """Load the units that stay, tie the tied weights, and install hooks that load the other units when
        they run."""
        for unit in self.units:
            if unit.stays:
                self._load(unit)
        for name, holder in self._ties.items():
            parent, _, own = name.rpartition(".")
            setattr(self.model.get_submodule(parent), own, self.model.get_parameter_or_buffer(holder))
        for unit in self.units:
            if not unit.stays:
                unit.module.register_forward_pre_hook(self._enter(unit), with_kwargs=True)
                unit.module.register_forward_hook(_leave(unit), with_kwargs=True)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.device)

    def _enter(self, unit: Unit) -> Callable[..., None]:
        """Make the hook that loads a unit before it runs."""

        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A meta tensor computes without an error, and its result is noise.
            if any(getattr(value, "is_meta", False) for value in (*args, *kwargs.values())):
                raise _refuse_run(self.class_name, f"{unit.path} gets a tensor on the meta device")
            self._load(unit)

        return enter

    def _load(self, unit: Unit) -> None:
        """Load the weights of a unit.

        Raises:
            FastshardError: ``FS102``, ``FS201`` or ``FS514``; others if a tensor cannot be read.
        """
        slices = {name: Slice(self.view[name]) for name in unit.stored}
        with hide_progress():
            info, _ = self._loading.convert_and_load_state_dict_in_model(self.model, slices, self._config)
        for name, stored, own in sorted(info.mismatched_keys):
            raise FastshardError.of(
                codes.SHAPE,
                "the model has another shape for this tensor",
                tensor=name,
                expected=str(tuple(own)),
                got=str(tuple(stored)),
            )
        if failed := [*info.error_msgs, *info.conversion_errors.values()]:
            raise FastshardError.of(
                codes.UNSUPPORTED, f"transformers could not load the tensor: {failed[0]}", tensor=unit.path
            )
        for name, parameter in unit.module.named_parameters():
            if name not in unit.released:
                continue
            if parameter.is_meta:
                raise _missing(f"{unit.path}.{name}".lstrip("."))
            # Where values lie in memory decides how a processor adds: in a mapped file they may lie anywhere.
            if parameter.data_ptr() % ALIGNMENT:
                parameter.data = parameter.data.clone()
        self._on_load(unit.nbytes)


def _leave(unit: Unit) -> Callable[..., None]:
    """Make the hook that releases the weights of a unit after it ran."""

    def leave(module: Any, *_: Any) -> None:
        module.load_state_dict(unit.released, strict=False, assign=True)

    return leave


def _pass_input(unit: Unit, watch: Watch) -> Callable[..., Any]:
    """Make the hook that passes a unit's hidden states to the callback, and replaces them."""

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = _find_input(args, kwargs)
        if isinstance(place, str):
            replaced = watch(unit, kwargs[place])
            return None if replaced is None else (args, {**kwargs, place: replaced})
        if place is None or (replaced := watch(unit, args[place])) is None:
            return None
        return (*args[:place], replaced, *args[place + 1 :]), kwargs

    return before


def _pass_output(unit: Unit, watch: Watch) -> Callable[..., Any]:
    """Make the hook that passes a unit's output to the callback, and replaces it."""

    def after(module: Any, args: Any, output: Any) -> Any:
        has_more = isinstance(output, (tuple, list))
        first = output[0] if has_more else output
        if not hasattr(first, "is_floating_point") or (replaced := watch(unit, first)) is None:
            return None
        return type(output)([replaced, *output[1:]]) if has_more else replaced

    return after


def _find_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Find the hidden states among a module's arguments: a position or a name; None if there are none."""
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next((at for at, value in enumerate(args) if hasattr(value, "is_floating_point")), None)


def _list_units(model: Any) -> Iterator[Unit]:
    """List the units of a model in the order of its modules."""
    layer_classes = set(model._no_split_modules or ())
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if inside and path.startswith(inside):
            continue
        is_layer = type(module).__name__ in layer_classes and path != ""
        if is_layer:
            inside += (f"{path}.",)
        tensors = {n: t for n, t in module.state_dict().items() if is_layer or "." not in n}
        if tensors:
            yield Unit(path, module, tensors)


def _list_ignored(model: Any) -> re.Pattern[str] | None:
    """Return the pattern of names that transformers ignores when it loads a model; None if there is none.

    source: transformers modeling_utils.py (_adjust_missing_and_unexpected_keys)
    """
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None


def _import_loading() -> Any:
    """Import transformers' functions that load tensors one by one.

    Raises:
        FastshardError: ``FS514`` if this version of transformers lacks them.
    """
    from types import SimpleNamespace

    import transformers

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            convert_and_load_state_dict_in_model,
            dot_natural_key,
            rename_source_key,
        )
        from transformers.modeling_utils import LoadStateDictConfig
    except ImportError as error:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"transformers {transformers.__version__} cannot load a model layer by layer: {error}",
            expected=f"transformers {'.'.join(map(str, _OLDEST))} or later",
            help="install a newer version of transformers; fastshard.load_model, which loads all layers at "
            "once, works with this one",
        ) from None
    return SimpleNamespace(
        WeightConverter=WeightConverter,
        WeightRenaming=WeightRenaming,
        LoadStateDictConfig=LoadStateDictConfig,
        convert_and_load_state_dict_in_model=convert_and_load_state_dict_in_model,
        dot_natural_key=dot_natural_key,
        get_model_conversion_mapping=get_model_conversion_mapping,
        rename_source_key=rename_source_key,
    )


def _find_config(view: PlannedView) -> dict[str, Any]:
    """Return the config of a view, in the form that transformers classes accept.

    Raises:
        FastshardError: ``FS209`` without a config, ``FS514`` for quantised weights.
    """
    config = view.config
    if config is None:
        raise FastshardError.of(
            codes.FACT_UNKNOWN, "no config.json states which model it is", help="pass it with --config"
        )
    if config.get("quantization_config"):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "the weights are quantised, and fastshard does not compute with quantised weights",
            help="dequantise the weights",
            run=["--dtype bf16"],
        )
    return for_construction(config)


def _find_class_name(config: dict[str, Any]) -> str:
    """Return the name of the class of transformers that a config names.

    Raises:
        FastshardError: ``FS514`` if it is not a causal language model of this version.
    """
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    names = [str(name) for name in config.get("architectures") or ()]
    causal: set[str] = set()
    for classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        causal |= {classes} if isinstance(classes, str) else set(classes)
    # An encoder sees the next token unless it is made a decoder, and XLNet's labels are not shifted.
    kind = config.get("model_type")
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder")
    is_other = is_encoder or config.get("is_encoder_decoder") or kind == "xlnet"
    if not names or names[0] not in causal or is_other:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "the model is not a causal language model; only those have a loss on a text",
            expected=f"a causal language model of transformers {transformers.__version__}",
            got=", ".join(names) or "no architectures in config.json",
        )
    return names[0]


def _build(class_name: str, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Build a model with its parameters on the meta device and its buffers in memory.

    The constructors compute buffers that no file has.

    Raises:
        FastshardError: ``FS514`` for a config that the class does not accept.
    """
    import transformers

    kind = getattr(transformers, class_name)
    try:
        with hide_progress(), _parameters_on_meta():
            return kind._from_config(kind.config_class.from_dict(config), dtype=dtype).eval()
    except Exception as error:
        # Each class checks its config in its own way.
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"{class_name} of transformers {transformers.__version__} cannot be built from the config: "
            f"{type(error).__name__}: {error}",
            file="config.json",
            help="look for a wrong value in the config, or use the version of transformers that it states",
        ) from error


def _choose_device(device: Any) -> torch.device:
    """Return the device that computes.

    Raises:
        FastshardError: ``FS515`` for a device that torch does not find.
    """
    import torch

    try:
        chosen = torch.device(device)
        # What torch was built without, or no driver finds, fails when it is used.
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise FastshardError.of(
            codes.USAGE, f"no such device: {str(error).splitlines()[0]}", got=str(device)
        ) from None
    if chosen.type == "meta":
        raise FastshardError.of(codes.USAGE, "this device cannot compute", got=str(device))
    return chosen


#: Lock for replacing a method of torch's Module; without it, another thread could keep the replacement
#: forever.
_building = threading.Lock()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it, before it is initialised.

    Modules that other threads build at the same time are not affected.
    """
    import torch

    own_thread = threading.get_ident()

    def register_on_meta(module: Any, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and threading.get_ident() == own_thread:
            own = module._parameters[name]
            module._parameters[name] = torch.nn.Parameter(own.to("meta"), requires_grad=own.requires_grad)

    with _building:
        register = torch.nn.Module.register_parameter
        torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextlib.contextmanager
def hide_progress() -> Iterator[None]:
    """Hide the progress bars that transformers draws when it loads tensors."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _missing(name: str) -> FastshardError:
    """Build the error for a tensor of the model that the checkpoint does not hold."""
    return FastshardError.of(
        codes.MISSING_TENSOR, "the model needs this tensor, and the checkpoint lacks it", tensor=name
    )


def _refuse_run(class_name: str, what: str) -> FastshardError:
    """Build the error for a model that cannot be run layer by layer."""
    import transformers

    return FastshardError.of(
        codes.UNSUPPORTED,
        f"{class_name} of transformers {transformers.__version__} cannot be run layer by layer: {what}",
        help="use fastshard.load_model, which loads all layers",
    )
