"""A program for a separate process, which lists the tensors that a config promises, with the installed
transformers.

    python -I transformers_worker.py ASKED ANSWER

ASKED is a JSON file: `config` (cleaned by the caller), `class` (a name, or null), `path` (the search path for
packages) and `memory` (bytes). With `stored` (names, dtypes and shapes), the program lists the problems of
loading these tensors. With `adapter` (the config of a peft adapter) and `adapter_tensors` (shapes by name),
it lists the tensors that peft saves for the adapter, and those that are missing from these. ANSWER is written
as JSON: the list, or `error`. The model is built on the `meta` device, so no weight takes memory, and no code
of a checkpoint can run. The program imports nothing of fastshard.

source: transformers 5.24 modeling_utils.py (save_pretrained, _from_config), core_model_loading.py
    (revert_weight_conversion)
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Unknown(Exception):
    """Raised if this version of transformers has no class for the config."""


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Block any access to the network."""
    if event in (
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.sendto",
        "socket.sendmsg",
    ):
        raise PermissionError(f"listing expected tensors must not use the network: {arguments[-1]!r}")


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build models without storage or random numbers, as from_pretrained itself does."""
    import torch
    from transformers import initialization

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        for name in ("no_init_weights", "meta_device_safe_creation_ops"):
            if hasattr(initialization, name):
                stack.enter_context(getattr(initialization, name)())
        yield


def decoded(value: Any) -> Any:
    """Decode numbers that JSON lacks, in transformers' encoding for configs."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: decoded(inner) for key, inner in value.items()}
    return [decoded(inner) for inner in value] if isinstance(value, list) else value


def config_of(question: dict[str, Any]) -> Any:
    """Return the config as an object of its class."""
    from transformers import CONFIG_MAPPING

    kind = question["config"].get("model_type")
    if not isinstance(kind, str):
        raise Unknown("the config has no model_type")
    if kind not in CONFIG_MAPPING:
        raise Unknown(f"model_type {kind!r}")
    return CONFIG_MAPPING[kind].from_dict(decoded(question["config"]))


def class_of(config: Any, name: str | None) -> Any:
    """Return the class that wrote the checkpoint: the class in its config, or the one for its model_type."""
    import transformers

    if name is not None:
        found = getattr(transformers, name, None)
        if found is None or not hasattr(found, "_from_config"):
            raise Unknown(f"transformers has no class {name}")
        return found
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise Unknown(f"no class for model_type {config.model_type!r}")


def tied(model: Any) -> list[list[str]]:
    """List groups of names that share a tensor, by identity."""
    names: dict[int, list[str]] = {}
    for kind in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in kind:
            names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def spelled(names: list[str], words: Any) -> set[str]:
    """Return the names of tensors that a class keeps in float32, whatever its dtype."""
    keys = [re.escape(word) for word in words or ()]
    pattern = re.compile("|".join(rf"(?:^|\.){key}(?:\.|$)" for key in keys)) if keys else None
    return {name for name in names if pattern is not None and pattern.search(name)}


def tracer() -> Any:
    """Load the module that traces tensors from the file next to this one.

    The folder of this program is not on the search path for packages.
    """
    spec = importlib.util.spec_from_file_location(
        "traced_tensors", Path(__file__).with_name("traced_tensors.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_disk(model: Any, state: dict[str, Any], kept: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors that save_pretrained writes, and the parts of those that it changes.

    It writes the tied tensors in ``kept``; the result has the parts of the others too.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    # Tied tensors are one object, and each name is followed.
    memory = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    trace = tracer().Trace(memory)
    with trace:
        saved = revert_weight_conversion(model, dict(memory))
    parts_by_name = {
        name: trace.parts(tensor) for name, tensor in saved.items() if not trace.is_itself(name, tensor)
    }
    left = state.keys() - kept
    written = {
        name: tensor
        for name, tensor in saved.items()
        if not left & ({part.name for part in parts_by_name[name] or ()} if name in parts_by_name else {name})
    }
    return written, parts_by_name


def listed(question: dict[str, Any]) -> dict[str, Any]:
    """List the tensors for the answer."""
    import torch
    import transformers
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    config = config_of(question)
    cls = class_of(config, question["class"])
    dtype = getattr(config, "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    with on_meta():
        model = cls._from_config(config, dtype=dtype)
        model.tie_weights()
    ties = tied(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    plan = model._get_dtype_plan(model.dtype) if hasattr(model, "_get_dtype_plan") else {}
    for name in spelled(list(state), plan):
        state[name] = state[name].to(torch.float32)
    kept = set(remove_tied_weights_from_state_dict(dict(state), model))
    saved, parts_by_name = on_disk(model, state, kept)
    names = sorted({*saved, *state})
    keeps = {}
    for spelling, narrow in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        plan = model._get_dtype_plan(narrow) if hasattr(model, "_get_dtype_plan") else {}
        keeps[spelling] = sorted(spelled(names, plan))

    def entries(tensors: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
        return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]

    return {
        "class": cls.__name__,
        "model_type": config.model_type,
        "transformers": transformers.__version__,
        "tensors": entries(saved),
        "in_memory": entries(state),
        "made": parts_by_name,
        "ties": ties,
        "keeps": keeps,
        "may_be_missing": sorted(model._keys_to_ignore_on_load_missing or ()),
        "may_be_unexpected": sorted(model._keys_to_ignore_on_load_unexpected or ()),
    }


def loading(question: dict[str, Any]) -> dict[str, Any]:
    """Return the errors that from_pretrained would report for stored names, dtypes and shapes.

    The check reads no values.

    from_pretrained reads more spellings than it writes, such as those of earlier versions and other vendors.
    """
    import torch

    config = config_of(question)
    cls = class_of(config, question["class"])
    state = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in question["stored"]
    }
    dtype = getattr(config, "dtype", None)
    try:
        with on_meta():
            # The map of devices needs the package accelerate.
            _, loading_info = cls.from_pretrained(
                None,
                config=config,
                state_dict=state,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                device_map={"": "meta"},
                dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32,
            )
    except RuntimeError as error:  # tensors of one stack that do not fit together
        first = str(error).splitlines()[0] if str(error) else "RuntimeError"
        return {"complaints": [first], "base": ""}
    complaints = [str(name) for name in loading_info.get("missing_keys", ())]
    complaints += [
        str(one[0] if isinstance(one, tuple) else one) for one in loading_info.get("mismatched_keys", ())
    ]
    complaints += [str(one) for one in loading_info.get("error_msgs", ())]
    complaints += [str(one) for one in loading_info.get("conversion_errors", None) or ()]
    return {"complaints": sorted(complaints), "base": str(getattr(cls, "base_model_prefix", "") or "")}


def list_adapter(question: dict[str, Any]) -> dict[str, Any]:
    """List the tensors that peft saves for an adapter, and those that are missing among these names and
    shapes."""
    import torch
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    config = config_of(question)
    with on_meta():
        model = class_of(config, question["class"])._from_config(config, dtype=torch.float32)
        model.tie_weights()
        # It passes over keys that this version does not know.
        config_class: Any = PeftConfig
        adapter = config_class.from_peft_type(**decoded(question["adapter"]))
        adapted = get_peft_model(model, adapter, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    # Rows of an embedding that go along for a load elsewhere are the base's own.
    saved = sorted(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    state = {name: torch.empty(shape, device="meta") for name, shape in question["adapter_tensors"].items()}
    try:
        loaded: Any = set_peft_model_state_dict(
            adapted, state, ignore_mismatched_sizes=True, low_cpu_mem_usage=True
        )
    except (KeyError, RuntimeError, ValueError):
        return {"saved": saved, "missing": None}
    return {"saved": saved, "missing": sorted(loaded.missing_keys)}


def answer_to(question: dict[str, Any]) -> dict[str, Any]:
    """Return the requested list, or the reason for a failure as ``error`` and ``kind``, for any class."""
    try:
        if "adapter" in question:
            return list_adapter(question)
        return loading(question) if "stored" in question else listed(question)
    except ImportError as error:
        return {"error": f"{type(error).__name__}: {error}", "kind": "import"}
    except Unknown as error:
        return {"error": str(error), "kind": "unknown"}
    except MemoryError:
        return {"error": "it exceeds its memory limit", "kind": "limit"}
    except Exception as error:
        if "std::bad_alloc" in str(error):
            return {"error": "it exceeds its memory limit", "kind": "limit"}
        return {"error": f"{type(error).__name__}: {error}", "kind": "build"}


def main(question_file: str, answer: str) -> int:
    """Write the answer; return 0 on success."""
    sys.addaudithook(refuse_network)
    # It does not outlive whoever asks. source: prctl(2), PR_SET_PDEATHSIG
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    question = json.loads(Path(question_file).read_text("utf-8"))
    resource.setrlimit(resource.RLIMIT_DATA, (question["memory"],) * 2)
    if (seconds := question["processor_seconds"]) > 0:
        # SIGXCPU ends it: the parent tells this limit from the others by it.
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = seconds if hard == resource.RLIM_INFINITY else min(seconds, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
    sys.path += [path for path in question["path"] if path not in sys.path]
    found = answer_to(question)
    Path(answer).write_text(json.dumps(found), "utf-8")
    return int("error" in found)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
