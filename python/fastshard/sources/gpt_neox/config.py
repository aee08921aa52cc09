"""The properties that a GPT-NeoX checkpoint states for its model: arguments in the files, and the saved YAML.

Sizes come from tensors if possible: for Llama models, ``intermediate_size`` in the YAML differs from the
stored size. source: gpt-neox megatron/neox_arguments, megatron/checkpointing.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...common import codes
from ...common.config_text import parse_yaml, shown
from ...common.errors import FastshardError, Finding
from ...common.listing import Listing
from ...common.options import MAX_DEGREE
from ...common.records import dataclass, field
from ...models import config_json, gpt_neox
from ...models.config_fields import count
from ...models.overridden_settings import find_missing_rows, find_overridden_settings, is_config_json
from ...models.repeated_settings import find_repeated_spellings
from ..base import Options

#: Maximum number of layers; no model has as many.
MAX_LAYERS = 1 << 14
#: Maximum of layers times ranks; each rank has a shard of each layer.
_MAX_SHARDS = 1 << 17
_LIMITS = {"num_layers": MAX_LAYERS, "model_parallel_size": MAX_DEGREE}


@dataclass(frozen=True)
class TrainingConfig:
    """The model settings in the YAML that was saved with a checkpoint, and in ``--config``."""

    #: All settings except the arguments in the files.
    config: dict[str, Any]
    path: str | None
    #: Model settings in ``--config``, which replace the checkpoint's.
    overrides: Mapping[str, Any] = field(default_factory=dict)
    #: Settings in the saved YAML, if ``--config`` is given.
    saved: Mapping[str, Any] = field(default_factory=dict)
    #: Content of ``--config``, if it is a config.json.
    config_json: Mapping[str, Any] = field(default_factory=dict)


def read(
    listing: Listing, places: Sequence[tuple[int, str]], options: Options, findings: list[Finding]
) -> TrainingConfig:
    """Read the training config: that of ``--config``, or all YAML files saved with the step, merged.

    If ``--config`` is a config.json, it provides some of the settings.

    Raises:
        FastshardError: ``FS211`` for a malformed config, ``FS514`` for settings that GPT-NeoX does not
            support.
    """
    if options.config is None:
        return TrainingConfig(*_read_saved(listing, places, findings))
    try:
        saved, _ = _read_saved(listing, places, [])
    except FastshardError:
        # What is wrong with it may be why there is another one.
        saved = {}
    if is_config_json(options.config):
        findings += config_json.find_contradictions(options.config, options.config_path or "config.json")
        overrides = gpt_neox.read_config_settings(options.config)
        return TrainingConfig({**saved, **overrides}, options.config_path, overrides, saved, options.config)
    findings += find_repeated_spellings(options.config, options.config_path or "config")
    config = {str(k).replace("-", "_"): v for k, v in options.config.items()}
    overrides = {
        key: value for key, value in config.items() if key in gpt_neox.SETTINGS and value is not None
    }
    return TrainingConfig(config, options.config_path, overrides, saved)


def _read_saved(
    listing: Listing, places: Sequence[tuple[int, str]], findings: list[Finding]
) -> tuple[dict[str, Any], str | None]:
    merged: dict[str, Any] = {}
    path = None
    folders = {(root, f"{folder}/configs" if folder else "configs") for root, folder in places}
    for file in sorted(
        (f for f in listing.files if (f.root, f.folder) in folders), key=lambda f: (f.path, f.root)
    ):
        if not file.name.endswith((".yml", ".yaml")):
            continue
        try:
            content = parse_yaml(listing.read_text(file, limit=4 << 20))
        except ValueError as error:
            raise FastshardError.of(codes.BAD_VALUE, str(error), file=file.path) from None
        if not isinstance(content, dict):
            continue
        for key, value in content.items():
            # NeoX mixes '-' and '_' in its keys and reads both.
            key = str(key).replace("-", "_")
            if key in merged and merged[key] != value:
                findings.append(
                    Finding.of(
                        codes.RANKS_DISAGREE,
                        f"the saved configs disagree on {key}",
                        file=file.path,
                        expected=shown(merged[key]),
                        got=shown(value),
                        help="pass the config of this checkpoint",
                        run=["--config FILE"],
                    )
                )
            merged[key] = value
        path = file.path
    return merged, path


def arguments_of(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments in a rank file as a dict; None if there are none."""
    args = state.get("args")
    if isinstance(args, dict) and "__class__" in args:
        # A Namespace arrives as an inert record with its state.
        args = args.get("state")
    return args if isinstance(args, dict) else None


def arguments(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of the first rank file that contains any."""
    return next((args for state in states if (args := arguments_of(state)) is not None), {})


@dataclass
class Model:
    """A GPT-NeoX model, as far as its checkpoint describes it."""

    layers: int | None = None
    tp: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    path: str | None = None
    axes: dict[str, int] = field(default_factory=dict)
    facts: dict[str, bool] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: dict[str, Any], training: TrainingConfig, findings: list[Finding]) -> Model:
        """Combine the arguments in the files with the YAML, and report contradictions.

        Model settings in ``--config`` take precedence, and each difference from the checkpoint is noted.
        """
        config, path = training.config, training.path
        args = {key: value for key, value in args.items() if value is not None}
        findings += find_overridden_settings(
            {**training.saved, **args}, training.overrides, gpt_neox.SETTINGS, path
        )
        args |= {key: value for key, value in training.overrides.items() if key in args}

        def number(key: str) -> int | None:
            inside, outside = args.get(key), config.get(key)
            for value in (inside, outside):
                whole = isinstance(value, int) and not isinstance(value, bool)
                limit = _LIMITS.get(key, 1 << 48)
                if value is not None and not (whole and 0 < value <= limit):
                    raise FastshardError.of(
                        codes.BAD_VALUE,
                        f"config: {key}",
                        file=path,
                        expected="a positive integer" + (f", {limit} at most" if key in _LIMITS else ""),
                        got=shown(value),
                    )
            if inside is not None and outside is not None and inside != outside:
                findings.append(
                    Finding.of(
                        codes.CONFIG_DISAGREES,
                        f"the config's {key} differs from the checkpoint's",
                        file=path,
                        expected=str(inside),
                        got=str(outside),
                        evidence=f"the checkpoint's arguments say {key} {inside}",
                        help="pass the config of this checkpoint",
                        run=["--config FILE"],
                    )
                )
            return inside if inside is not None else outside

        model = cls(
            layers=number("num_layers"), tp=number("model_parallel_size"), config={**config}, path=path
        )
        hidden, heads = number("hidden_size"), number("num_attention_heads")
        padded = args.get("padded_vocab_size")
        model.heads, model.kv_heads = heads, number("num_kv_heads")
        axes = {
            "L": model.layers,
            "H": hidden,
            "P": padded if isinstance(padded, int) and padded > 0 else None,
        }
        if hidden and heads and hidden % heads == 0:
            axes["d"] = hidden // heads
        # A training config has another size under this name.
        axes["F"] = count(training.config_json, "intermediate_size")
        findings += find_missing_rows(training.config_json, padded, path)
        model.axes = {k: v for k, v in axes.items() if v}
        for fact, key, wanted in (
            ("gpt_j_residual", "gpt_j_residual", True),
            ("tied", "no_weight_tying", False),
        ):
            value = config.get(key)
            if isinstance(value, bool):
                model.facts[fact] = value is wanted
        model.config.update(args)
        return model

    def bounded(self, layers: int, tp: int) -> None:
        """Check stated or counted numbers before the search for shards.

        Raises:
            FastshardError: ``FS211`` for a number higher than in any run.
        """
        if layers * tp > _MAX_SHARDS:
            raise FastshardError.of(
                codes.BAD_VALUE,
                "num_layers times model_parallel_size, as stated or by the file names",
                file=self.path,
                expected=f"at most {_MAX_SHARDS}",
                got=f"{layers} times {tp}",
            )
