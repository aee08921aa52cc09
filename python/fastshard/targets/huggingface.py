"""The Hugging Face target: its layout and facts, and the ``config.json`` that ``from_pretrained`` needs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from .._core import Table
from ..common import codes, config_text
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass
from ..common.regex import compile_when_used
from ..common.target_options import CARD
from ..layouts import tables
from ..layouts.declaration import Description, Source, is_state
from ..layouts.model_classes import ModelClass
from ..layouts.wrapper_names import wrapped
from ..models import config_json, huggingface
from ..models.model import Model, read_model
from ..models.tokenizer import Tokenizer
from .base import Bound, Completed, Target
from .form import Form
from .request import Request

#: Keys under which trainers store their model. No transformers model has a part of that name.
_HOLDERS = {
    "net",
    "network",
    "actor",
    "policy",
    "critic",
    "student",
    "teacher",
    "ema",
    "ema_model",
    "model_ema",
    "state_dict",
    "app",
    "wrapped",
    "inner_model",
}
#: Names at the top level of a complete model, below another key.
_WHOLE_BELOW = compile_when_used(r"model\.(lm_head|embed_out|model|transformer|score)\.")


@dataclass
class HfTarget(Target):
    """A checkpoint that ``from_pretrained`` loads, converted from a source."""

    source: Source
    layout: str
    facts: dict[str, bool]
    #: The model and the transformers class that computes it; None if the source is already a transformers
    #: model.
    model: Model | None = None
    kind: ModelClass | None = None
    #: The caller's own table, if the result is described by it.
    own: Table | None = None
    #: True if a model card is to be drafted.
    card: bool = False
    name: str = "hf"
    names = ("hf",)
    is_whole = takes_any_head = True
    options = (CARD,)

    @classmethod
    def of(cls, source: Source, request: Request | None = None) -> HfTarget:
        """Make the target for a source; ``request`` is None if another target uses it internally.

        Raises:
            FastshardError: ``FS514`` for a family without a Hugging Face layout, ``FS209`` if a fact that
                decides values, or the model, is unknown.
        """
        made = cls._of(source)
        if request is not None and request[CARD]:
            from .model_card import is_copied

            made.card = not is_copied(source)
        return made

    @classmethod
    def _of(cls, source: Source) -> HfTarget:
        told = source.model
        config = told.config or {}
        if told.hf_names:
            layout, own = _layout_of(source, config)
            quantised = config_json.quantised_by(config) is not None
            if layout is None or told.headless or source.binding.table is not None or quantised:
                return cls(source, _kept(source), {})
            return cls(source, layout, config_json.described(config, layout=own or layout)[1], own=own)
        if told.spelling is not None:
            layout = str(config_json.layout_of(config))
            return cls(source, layout, config_json.described(config, layout=layout)[1])
        if told.dialect is not None:
            model = read_model(source)
            kind = huggingface.class_of(
                model,
                f"run `fastshard merge`, which writes the full tensors under {source.framework}'s own names",
            )
            model.settled("activation")
            layout = huggingface.layout_of(model, kind)
            return cls(source, layout, huggingface.facts_of(model, kind), model, kind)
        if told.no_table is not None:
            raise _changed(told.no_table)
        if told.family is None and told.config is None and source.tree is None:
            raise _unknown()
        raise FastshardError.of(codes.UNSUPPORTED, f"there is no Hugging Face layout for {source.called} yet")

    @classmethod
    def known(cls, source: Source, what: str) -> HfTarget:
        """Make the target for a source whose tensors a table must describe; ``what`` states the purpose.

        Raises:
            FastshardError: as :meth:`of`, and ``FS514`` for a model without a table.
        """
        whole = cls.of(source)
        if whole.keeps_names:
            is_quantised = config_json.quantised_by(whole.source.model.config or {}) is not None
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"{_why(source.model)}: no layout describes the tensors, which {what} needs",
                help="dequantise the weights"
                if is_quantised
                else "merge it, or choose the target hf: both keep its names; or describe the model in your "
                "own table",
                run=["--dtype bf16"]
                if is_quantised
                else ["fastshard merge CKPT OUT", "--to hf", "--layout FILE.toml"],
            )
        return whole

    @property
    def keeps_names(self) -> bool:
        """True if no table describes the names, so that they stay unchanged."""
        return not self.layout

    def form(self) -> Form:
        """Return the form of the result."""
        if not self.layout:
            return Form(self.name)
        return Form(self.name, self.own or tables.table(self.layout), facts=self.facts)

    def config(self, axes: dict[str, int]) -> tuple[dict[str, Any], list[Finding]]:
        """Return the model's config.json without its dtype, and the assumptions.

        Sizes are taken from the tensors.
        """
        if self.model is not None and self.kind is not None:
            return huggingface.write(self.model, self.kind, axes, "config.json")
        config = dict(self.source.model.config or {})
        if "V" in axes:
            config["vocab_size"] = axes["V"]
        return config, []

    def complete(self, bound: Bound) -> Completed:
        """Return the config.json of the result, and the assumptions.

        Raises:
            FastshardError: ``FS514`` if names stay unchanged and are not the model's own.
        """
        if self.keeps_names:
            _refuse_changed(self.source, bound)
            texts = self._card(self.source.model.config or {}, bound)
            return Completed(texts, [] if self.source.index.is_reference else [_unproven(self.source)])
        config, assumed = self.config(bound.axes)
        if self.model is not None:
            config, told = _special_tokens(config, bound.tokenizer, self.source, bound.axes.get("V"))
            assumed += told
        text = config_text.written(config_json.with_dtype(config, bound.dtype))
        return Completed({"config.json": text} | self._card(config, bound), assumed)

    def _card(self, config: dict[str, Any], bound: Bound) -> dict[str, str]:
        """Return the model card, if the caller requests a draft."""
        if not self.card:
            return {}
        from .model_card import CARD_NAME, drafted

        return {CARD_NAME: drafted(self.source, config, bound, is_described=not self.keeps_names)}


def model_of(source: Source, what: str) -> Model:
    """Return what a source's model computes, for a target that depends on it.

    ``what`` is the purpose, for messages.

    Raises:
        FastshardError: as :meth:`HfTarget.known` for a model of Hugging Face, and ``FS514`` for an unknown
            model.
    """
    if source.model.dialect is None or source.model.hf_names:
        HfTarget.known(source, what)
    return read_model(source)


def _layout_of(source: Source, config: dict[str, Any]) -> tuple[str | None, Table | None]:
    """Return name and table of a transformers model's layout; the table only if it is the caller's.

    The name is None if no table fits. A caller's table describes the stored names. It describes transformers'
    names only if the family has no other table for the model.
    """
    layout = None if source.model.no_table is not None else config_json.layout_of(config)
    own = source.binding.own_table
    if own is not None:
        other = layout not in (None, own.name) and tables.family(str(layout)) == own.family
        if not other and config_json.is_for(own, config):
            return own.name, own
    return layout, None


def _kept(source: Source) -> str:
    """Return an empty layout, with which names and shapes stay unchanged.

    Raises:
        FastshardError: ``FS209`` if no config.json describes the model, ``FS514`` if its vocabulary must be
            cut and it has no table.
    """
    if not source.model.config:
        raise _unknown()
    if source.binding.vocab_size is not None:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"--vocab-size: {_why(source.model)}, so fastshard does not know which rows are tokens",
            help="leave it out, or describe the model in your own table",
            run=["--layout FILE"],
        )
    return ""


def _unknown() -> FastshardError:
    return FastshardError.of(
        codes.FACT_UNKNOWN,
        "unknown model: there is no config.json next to the checkpoint or above it",
        help="pass the config, or merge, which needs none and keeps the names",
        run=["--config FILE", "fastshard merge CKPT OUT"],
    )


def _changed(why: str, prefix: str | None = None) -> FastshardError:
    if ".lora_" in why:
        return FastshardError.of(
            codes.UNSUPPORTED,
            f"{why}: no loader would find the model under these names",
            help="merge the factors with the adapter_config.json of the run, or merge the checkpoint, which "
            "keeps the names",
            run=["--adapter FILE", "fastshard merge CKPT OUT"],
        )
    return FastshardError.of(
        codes.UNSUPPORTED,
        f"{why}: no loader would find the model under these names",
        help="save the model itself (unwrapped, adapters merged), or merge it, which keeps the names"
        if prefix is None
        else "pass the prefix of the model, or merge it, which keeps the names",
        run=[*([] if prefix is None else [f"--prefix {shlex.quote(prefix)}"]), "fastshard merge CKPT OUT"],
    )


def _why(model: Description) -> str:
    """Return the reason why the names of a Hugging Face model stay unchanged."""
    if model.no_table is not None:
        return model.no_table
    if model.headless is not None:
        return f"architectures says {model.headless}"
    if (method := config_json.quantised_by(model.config or {})) is not None:
        return f"quantization_config ({method}) keeps scales next to the weights (--dtype dequantises them)"
    return "the names of the model have a separate prefix"


def _refuse_changed(source: Source, bound: Bound) -> None:
    """Check that unchanged names are the model's own.

    Raises:
        FastshardError: ``FS514`` if a wrapper, or a trainer's own key, has changed them.
    """
    if (changed := wrapped(bound.tensors)) is not None:
        raise _changed(f"{changed[1]} has changed the names ({changed[0]})")
    if (name := _find_foreign_key(source, bound.tensors)) is not None:
        raise _changed(
            f"the model is under a trainer's own key ({name})",
            name.partition(".")[0],
        )


def _unproven(source: Source) -> Finding:
    """Return the finding that names stay unchanged although nothing proves them right."""
    return Finding.of(
        codes.NOT_PROVABLE,
        f"{_why(source.model)}: names and shapes are kept as stored, and no table shows that they match the "
        "model",
        help="compare the tensors with a good checkpoint of the model, a manifest (--expect) or your own "
        "table (--layout)",
        run=["--like GOOD"],
    )


def _find_foreign_key(source: Source, names: Iterable[str]) -> str | None:
    """Find a name below a top-level key that transformers does not know; None if there is none."""
    weights = [name for name in names if not is_state(name)]
    kept = next((name for name in weights if name.partition(".")[0] in _HOLDERS), None)
    if kept is None:
        # Only a whole model has these, and none calls itself so.
        kept = next((name for name in weights if _WHOLE_BELOW.match(name)), None)
    model = source.model
    renamed = source.binding.own_table is None and source.binding.table is not None and model.headless is None
    known = renamed and config_json.is_of_transformers(source.binding.layout)
    if kept is None and known and "auto_map" not in (model.config or {}):
        # The table fits the tensors, and the architecture is transformers' own: it begins where the table
        # does.
        kept = next(iter(weights), None)
    return kept


def _special_tokens(
    config: dict[str, Any], tokenizer: Tokenizer | None, source: Source, rows: int | None
) -> tuple[dict[str, Any], list[Finding]]:
    """Add the ids of the tokenizer's special tokens to a new config.

    With transformers' defaults, which are different ids, a model would not stop at the end of a text.
    """
    if tokenizer is None:
        return config, []
    special = dict(tokenizer.special or {})
    if source.framework == "GPT-NeoX" and tokenizer.end_of_document is not None:
        special.setdefault("eos_token_id", tokenizer.end_of_document)
    notes = []
    for key, number in list(special.items()):
        if rows is not None and number >= rows:
            del special[key]
            why, expected = "is left out: the tokenizer's value has no row", f"an id below {rows}"
        elif isinstance(config.get(key), int) and config[key] != number:
            why, expected = "is set to the tokenizer's value", f"{config[key]}, by the training config"
        else:
            continue
        told = Finding.of(
            codes.NOT_PROVABLE,
            f"config: {key} {why}",
            severity="note",
            file="config.json",
            expected=expected,
            got=str(number),
        )
        notes.append(told)
    return config | special, notes
