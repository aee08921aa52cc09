"""NeMo 2 and Megatron-Bridge: torch_dist checkpoints whose settings are in a YAML file, not in ``common.pt``.

``NAME/weights`` contains the save, and ``NAME/context/model.yaml`` describes the model. Megatron-Bridge
writes ``run_config.yaml`` into the save's own folder. Both use the field names of Megatron's
``TransformerConfig``. Values of ``_target_`` are read as text; nothing is imported.
source: NeMo nemo/lightning/ckpt_utils.py, nemo/lightning/io/mixin.py (`_io_dump_yaml`),
    nemo/lightning/io/pl.py (`MegatronCheckpointIO`), nemo/collections/llm/gpt/model/{base,llama}.py;
    Megatron-Bridge src/megatron/bridge/training/checkpointing.py, models/gpt_oss/gpt_oss_bridge.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...common import codes, safe_files
from ...common.config_text import parse_yaml, shown
from ...common.errors import FastshardError, error_for, raise_errors
from ...common.listing import Folder, Listing
from ...common.records import dataclass, field, replace
from ...layouts.declaration import Evidence
from ...models import megatron, sidecar_files
from ...models.model import Lack, Model
from ..base import as_dict, missing

#: The attribute for the model in NeMo's module.
PREFIX = "module."
#: NeMo's folder for a save, and the file with its settings next to that folder.
WEIGHTS = "weights"
MODEL_YAML = "context/model.yaml"
_RUN_CONFIG = "run_config.yaml"
#: Folders of the tokenizer next to the settings, by the name of the settings file.
_TOKENIZERS = {MODEL_YAML: "context/nemo_tokenizer", _RUN_CONFIG: "tokenizer"}
_MAX_YAML = 4 << 20
#: Arguments for config fields that have another name.
_RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "vocab_size",
    "make_vocab_size_divisible_by",
)
_FLAGS = (
    "share_embeddings_and_output_weights",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "should_pad_vocab",
)
#: Fields with the same name as an argument that are not settings to override.
_KEPT = (
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "seq_length",
    "make_vocab_size_divisible_by",
    "rotary_interleaved",
)
#: NeMo has its own fields for Llama 3.1's rotary scaling; only such a config has them. source:
#: nemo/collections/llm/gpt/model/llama.py (`Llama31Config`, `apply_rope_scaling`)
_SCALE = "scale_factor"
_FIXED_SCALING = {
    "low_freq_factor": megatron.LLAMA3_SCALING["low_freq_factor"],
    "high_freq_factor": megatron.LLAMA3_SCALING["high_freq_factor"],
    "old_context_len": megatron.LLAMA3_SCALING["original_max_position_embeddings"],
}
#: Settings with which parameters are rounded before they are stored. source: transformer_config.py
_ROUNDED = ("fp8_param_gather", "fp8_param", "fp4_param")


@dataclass(frozen=True)
class Settings:
    """The settings of a model, as Megatron-LM arguments."""

    framework: str
    #: The file that states them, as named in messages.
    file: str
    args: dict[str, Any]
    #: Settings for which there is no argument.
    lacking: list[Lack] = field(default_factory=list)
    #: Folders to search for config and tokenizer, the nearest first.
    folders: list[Folder] = field(default_factory=list)

    def of_optimizer(self) -> dict[str, Any]:
        """Return the arguments for reading the optimizer's state.

        A config describes a model, not a run: its parallel sizes may differ from those of the save.
        """
        return {key: True for key in _ROUNDED if self.args.get(key)}


def prefix_of(names: Iterable[str]) -> str:
    """Return the prefix before Megatron's own names of all weights: ``module.`` in NeMo, otherwise empty."""
    every = list(names)
    return PREFIX if every and all(name.startswith(PREFIX) for name in every) else ""


@dataclass(frozen=True)
class Unstated:
    """The dialect of a save whose settings file is missing, so that the model is unknown."""

    #: The file, as named in messages.
    file: str
    name: str = megatron.DIALECT.name

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Refuse to describe the model.

        Raises:
            FastshardError: ``FS101``.
        """
        finding = missing(
            self.file,
            {},
            "it states the settings of the model (layers, heads, norms), which no tensor shows",
            "copy it from the original checkpoint, or pass the model's config",
            run=["--config FILE"],
        )
        raise error_for([finding])


def name_settings(folder: str) -> str:
    """Return the path of the settings file for NeMo's save.

    Args:
        folder: folder of the save, relative to its root directory.
    """
    above, _, last = folder.rpartition("/")
    return f"{above}/{MODEL_YAML}" if above and last == WEIGHTS else MODEL_YAML


def read_settings(listing: Listing, folder: str) -> Settings | None:
    """Read the settings next to a save, or in its folder; None without a settings file.

    Args:
        listing: contents of the root directories.
        folder: folder of ``.metadata``, relative to its root directory.

    Raises:
        FastshardError: ``FS211`` for a file that is not YAML, or states an invalid value.
    """
    for framework, name, key in (("Megatron-Bridge", _RUN_CONFIG, "model"), ("NeMo", MODEL_YAML, "config")):
        place = _find(listing, folder, name, beside=name == MODEL_YAML)
        path = None if place is None else place.file(name)
        if place is None or path is None:
            continue
        label = _label(listing, path)
        raise_errors(sidecar_files.differing(listing, [path]))
        try:
            content = parse_yaml(safe_files.read_text(path, _MAX_YAML, label=label))
        except ValueError as error:
            raise FastshardError.of(codes.BAD_VALUE, str(error), file=label) from None
        if not isinstance(content, dict) or not isinstance(content.get(key), dict):
            raise FastshardError.of(
                codes.BAD_VALUE,
                f"the file states no model settings under `{key}`",
                file=label,
                expected=f"{key}: the fields of the model's config",
                got=shown(content.get(key) if isinstance(content, dict) else content),
                help="copy the file again from the original checkpoint, or move it away and pass the "
                "model's config",
                run=["--config FILE"],
            )
        args, lacking = _arguments(content[key], label)
        words = replace(place, path=place.path / _TOKENIZERS[name])
        return Settings(framework, label, args, lacking, [words, *sidecar_files.places(listing, folder)])
    return None


def _find(listing: Listing, folder: str, name: str, *, beside: bool) -> Folder | None:
    """Find the folder of a file: that of the save, or with ``beside`` the one above NeMo's ``weights``."""
    saves = {root.absolute() / folder if folder else root.absolute() for root in listing.roots}
    allowed = {path.parent for path in saves if path.name == WEIGHTS} if beside else saves
    places = (place for place in sidecar_files.places(listing, folder) if place.path.absolute() in allowed)
    return next((place for place in places if place.file(name) is not None), None)


def _label(listing: Listing, path: Path) -> str:
    """Return a path as named in messages: relative to its root directory."""
    inside = next((root for root in listing.roots if path.is_relative_to(root)), None)
    return str(path if inside is None else path.relative_to(inside))


def _arguments(config: Mapping[Any, Any], file: str) -> tuple[dict[str, Any], list[Lack]]:
    """Return the fields of a config as arguments, and the settings for which there is no argument.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    for key in _SIZES:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise _refused(file, key, "a positive integer or null", value)
    for key in _FLAGS:
        value = config.get(key)
        if value is not None and not isinstance(value, bool):
            raise _refused(file, key, "true, false or null", value)
    args = {
        new: value
        for key, value in config.items()
        if value is not None
        and (
            (new := _RENAMED.get(str(key), str(key))) in megatron.SETTINGS or new in _KEPT or _is_routing(new)
        )
    }
    if not config.get("multi_latent_attention") and config.get("position_embedding_type") == "yarn":
        args |= _read_yarn(config)
    lacking: list[Lack] = []
    heads, groups = config.get("num_attention_heads"), config.get("num_query_groups")
    if heads is not None:
        # Without a number of groups each head is one. source: transformer_config.py (`__post_init__`)
        args["num_query_groups"] = groups or heads
        args["group_query_attention"] = args["num_query_groups"] != heads
    if config.get("hidden_size") is not None and config.get("ffn_hidden_size") is None:
        args["ffn_hidden_size"] = 4 * config["hidden_size"]
    if (length := config.get("seq_length")) is not None:
        args.setdefault("max_position_embeddings", length)
    if isinstance(base := args.get("rotary_base"), float) and base.is_integer():
        args["rotary_base"] = int(base)
    if (shared := config.get("share_embeddings_and_output_weights")) is not None:
        args[megatron.UNTIED] = not shared
    if config.get("vocab_size") is not None and not config.get("should_pad_vocab"):
        # A config that states it has as many rows. source: gpt/model/base.py (`configure_model`)
        args["padded_vocab_size"] = config["vocab_size"]
    args |= {key: True for key in _ROUNDED if config.get(key)}
    lacking += _activation(config, args)
    lacking += _scaling(config, args)
    return args, lacking


def _read_yarn(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the YaRN arguments for heads, whose fields have different names.

    If one of the two attention scales is missing, the factor alone determines the scale.
    source: megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py
    (_yarn_get_concentration_factor)
    """
    scales = [config.get(f"yarn_{key}") for key in ("mscale", "mscale_all_dim")]
    some, every = (1.0, 0.0) if None in scales else scales
    factor = config.get("yarn_rotary_scaling_factor")
    return {"rotary_scaling_factor": factor, "mscale": some, "mscale_all_dim": every}


def _is_routing(name: str) -> bool:
    return name.startswith("moe_")


def _activation(config: Mapping[Any, Any], args: dict[str, Any]) -> list[Lack]:
    """Set ``swiglu`` or ``quick_geglu``; report another activation of a gated projection."""
    gated = config.get("gated_linear_unit")
    if gated is not None:
        args["swiglu"] = gated
    given = config.get("activation_func")
    function = str(as_dict(given).get("_target_") or given or "not stated")
    is_silu = function.rpartition(".")[2] in ("silu", "swish")
    if gated and function.rpartition(".")[2] == "quick_gelu":
        args |= {"swiglu": False, "quick_geglu": True}
        return []
    # Without either nothing is stated, and the shapes decide whether there is a gate.
    if is_silu or gated is False or (gated is None and given is None):
        return []
    return [Lack("activation_func", "silu", function[:80])]


def _scaling(config: Mapping[Any, Any], args: dict[str, Any]) -> list[Lack]:
    """Set the arguments of Llama 3's rotary scaling; report its settings for which there is no argument."""
    factor = config.get(_SCALE)
    if factor is None:
        if config.get("rope_scaling") is True:
            # source: megatron/core/models/gpt/gpt_model.py (`rope_scaling`)
            args["use_rope_scaling"] = True
        return []
    args["use_rope_scaling"], args["rope_scaling_factor"] = True, factor
    return [
        Lack(key, shown(fixed), shown(config.get(key)))
        for key, fixed in _FIXED_SCALING.items()
        if config.get(key) != fixed
    ]


def _refused(file: str, key: str, expected: str, got: Any) -> FastshardError:
    return FastshardError.of(
        codes.BAD_VALUE,
        f"{key} of the model's config",
        file=file,
        expected=expected,
        got=shown(got),
        help="copy the file again from the original checkpoint",
    )
