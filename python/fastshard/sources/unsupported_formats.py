"""Descriptions of unsupported formats, with advice for each."""

from __future__ import annotations

import re

from ..common.listing import Listing
from ..common.regex import compile_when_used

#: Pattern of a file name, description of such files, and advice.
_KNOWN = (
    (
        r"adapter_(model\.(safetensors|bin)|config\.json)$",
        "a part of a PEFT adapter",
        "put its adapter_config.json and its tensors in one directory; `fastshard merge BASE OUT --adapter "
        "DIR` merges it",
    ),
    (r".*\.gguf$", "GGUF, llama.cpp's format", "name the checkpoint that it was made from"),
    (
        r"consolidated(\.\d+)?\.(pth|safetensors)$",
        "Meta's or Mistral's own format",
        "name the model in Hugging Face format",
    ),
    (
        r"(flax_model.*\.msgpack|tf_model.*\.h5)$",
        "weights for Flax or TensorFlow",
        "save them with from_flax or from_tf as safetensors",
    ),
    (r".*\.nemo$", "an archive of NeMo", "unpack it"),
    (
        r".*\.(ckpt|pt|pth)$",
        "a file that a trainer saved",
        "name the file itself: fastshard reads the tensors under its keys",
    ),
    (r".*\.(onnx|engine|plan|tflite|pb)$", "a compiled model", "name the checkpoint that it was made from"),
    (
        r".*\.(npz|npy|pkl|pickle|msgpack)$",
        "arrays or pickles in a script's own format",
        "save the tensors as safetensors, under the model's names",
    ),
    (r".*\.tar(\.\w+)?$|.*\.(zip|tgz)$", "an archive", "unpack it"),
)
#: Unsupported formats, by file extension.
_UNREAD = compile_when_used(
    r"\.(gguf|ggml|onnx|engine|plan|tflite|pb|npz|npy|msgpack|h5|nemo|tar(\.\w+)?|tgz)$"
)
_GGUF = b"GGUF"


def find_unread_format(name: str, head: bytes) -> tuple[str, str] | None:
    """Describe a single file of an unsupported format, with advice; None for a file that a reader may open.

    Args:
        name: name of the file.
        head: its first bytes.
    """
    if not (head == _GGUF or _UNREAD.search(name)):
        return None
    called = "model.gguf" if head == _GGUF else name
    return next(((what, help) for pattern, what, help in _KNOWN if re.match(pattern, called)), None)


def looks_like(listing: Listing) -> tuple[str, str] | None:
    """Describe the apparent format of the files, with advice; None if it is unknown."""
    for pattern, what, help in _KNOWN:
        hit = next((file for file in listing.files if re.match(pattern, file.name)), None)
        if hit is not None:
            return f"{hit.path}: {what}", help
    return None
