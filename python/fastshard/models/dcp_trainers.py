"""What the models of torchtitan and OLMo-core compute. Their settings are only in the run's own code, not in
a checkpoint.

source: torchtitan 0.3.0 models/{llama3,qwen3,qwen3_5,deepseek_v3,gpt_oss},
    models/common/{rope,moe,feed_forward}.py;
OLMo-core nn/{rope,feed_forward,attention}
"""

from __future__ import annotations

import math

from ..common import codes
from ..common.config_text import shown
from ..common.errors import Finding
from ..common.records import dataclass, replace
from ..layouts import naming_schemes
from . import unsupported
from .model import Lack, Model, Rope
from .unsupported import Says

#: torchtitan has two rotary embeddings: one scales as Llama 3.1 does, the other is used with normalised
#: queries.
_TITAN_LLAMA = Says(kind="Llama", activations=("silu",), scalings=("default", "llama3"))
_TITAN_QWEN = Says(kind="Qwen3", activations=("silu",), scalings=("default",), qk_norm=(True,))
_TITAN_QWEN_MOE = replace(
    _TITAN_QWEN,
    kind="Qwen3-MoE",
    families=("mixtral", "qwen_moe", "qwen2_moe"),
    experts=True,
    unnormalised=True,
    scaled_experts=True,
    dense_layers="any",
)
_TITAN_DEEPSEEK = replace(
    _TITAN_QWEN_MOE,
    kind="DeepSeek-V3",
    families=("deepseek_v3",),
    scalings=("default", "yarn"),
    qk_norm=(False,),
    attentions=("latent",),
    scores=("sigmoid",),
    corrected=True,
    grouped_experts=True,
    shared_experts=True,
)
_TITAN_GPT_OSS = replace(
    _TITAN_QWEN,
    kind="gpt-oss",
    families=("gpt_oss",),
    activations=("clamped_swiglu",),
    scalings=("default", "yarn"),
    qk_norm=(False,),
    biases=((True, True, True, True),),
    window=True,
    windowed_layers="even",
    sinks=(True,),
    experts=True,
    router_bias=(True,),
)
_TITAN_QWEN3_5 = replace(
    _TITAN_QWEN,
    kind="Qwen3.5",
    shares=None,
    attentions=("delta", "heads"),
    output_gate=(True,),
)
_TITAN_QWEN3_5_MOE = replace(
    _TITAN_QWEN3_5,
    kind="Qwen3.5-MoE",
    families=("qwen3_next", "qwen3_5"),
    experts=True,
    shared_experts=True,
    needs_shared_experts=True,
    shared_gate=(True,),
)
#: The window size in torchtitan's own models. source: torchtitan models/gpt_oss/__init__.py
_TITAN_WINDOW = 128
_OLMO_CORE = Says(
    kind="Llama",
    activations=("silu", "gelu_pytorch_tanh"),
    scalings=("default", "linear", "llama3", "yarn"),
    window=True,
    qk_norm=(False, True),
)


@dataclass(frozen=True)
class Trainer:
    """A trainer whose checkpoints do not state any settings."""

    kinds: tuple[Says, ...]
    #: Features that its own state shows, or that the arrangement of its rows determines, although
    #: transformers has a key for them.
    covered: tuple[str, ...] = ()


_TRAINERS = {
    "torchtitan": Trainer(
        (
            _TITAN_LLAMA,
            _TITAN_QWEN,
            _TITAN_QWEN_MOE,
            _TITAN_DEEPSEEK,
            _TITAN_GPT_OSS,
            _TITAN_QWEN3_5,
            _TITAN_QWEN3_5_MOE,
        ),
        covered=("rope_interleave",),
    ),
    # Its windows follow a pattern of layers. source: OLMo-core nn/attention (SlidingWindowAttentionConfig)
    "olmo_core": Trainer((_OLMO_CORE,), covered=("sliding window in some layers",)),
}


def refuse(spelling: str, model: Model) -> None:
    """Refuse a model that the trainer cannot compute.

    Args:
        spelling: the trainer, by its name in its tables' names.
        model: the model to compute.

    Raises:
        FastshardError: ``FS514``, one finding for each reason.
    """
    trainer, name = _TRAINERS[spelling], naming_schemes.framework(spelling)
    others = tuple(lack for lack in model.others if lack.what not in trainer.covered)
    unsupported.refuse(name, trainer.kinds, replace(model, others=others))
    if spelling == "torchtitan" and (lacking := _list_lacks_of_yarn(model)):
        near = next(kind for kind in trainer.kinds if model.family in kind.families)
        raise unsupported.refused(name, near, lacking)


def _list_lacks_of_yarn(model: Model) -> list[Lack]:
    """List YaRN features that torchtitan's YaRN lacks: it scales attention by one number, and does not scale
    rotations.

    source: torchtitan models/{deepseek_v3,gpt_oss}/model.py (softmax_scale), models/common/rope.py
    (_yarn_inv_freq); transformers modeling_rope_utils.py (_compute_yarn_parameters)
    """
    rope = model.rope
    if rope.kind != "yarn":
        return []
    if model.attention.kind == "heads":
        return _list_lacks_of_scale(rope)
    scaling = {key: value for key, value in rope.scaling.items() if value is not None}
    every, some, factor = (scaling.get(key) for key in ("mscale_all_dim", "mscale", "attention_factor"))
    if factor is not None:
        return [] if factor == 1 else [Lack("rope_scaling (attention_factor)", "1", shown(factor))]
    if not every:
        return [Lack("rope_scaling (mscale_all_dim)", "a number", shown(every))]
    return [] if every == some else [Lack("rope_scaling (mscale)", shown(every), shown(some))]


def _list_lacks_of_scale(rope: Rope) -> list[Lack]:
    """List features of YaRN for heads that torchtitan lacks: it scales attention by the square of
    0.1*ln(factor)+1.

    transformers scales queries and keys by that number each, unless the config states another number.
    """
    scaling = {key: value for key, value in rope.scaling.items() if value is not None}
    factor = scaling.get("factor")
    if not isinstance(factor, (int, float)) or isinstance(factor, bool):
        return [Lack("rope_scaling (factor)", "a number", shown(factor))]
    full = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    stated, some, every = (scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if stated is not None:
        fits = isinstance(stated, (int, float)) and math.isclose(stated, full)
        return [] if fits else [Lack("rope_scaling (attention_factor)", f"{full:g}", shown(stated))]
    if not some or not every:
        return []
    return [Lack("rope_scaling (mscale)", "none", shown(some))]


def warn_of_settings(spelling: str, model: Model, file: str) -> list[Finding]:
    """Warn of settings that differ from those of torchtitan's own models and that no tensor shows.

    Args:
        spelling: the trainer, by its name in its tables' names.
        model: the model to compute.
        file: the config.json next to the result.
    """
    if spelling != "torchtitan":
        return []
    return [*_warn_of_routing(model, file), *_warn_of_window(model, file)]


def _warn_of_window(model: Model, file: str) -> list[Finding]:
    if model.window in (None, _TITAN_WINDOW):
        return []
    return [
        Finding.of(
            codes.NOT_PROVABLE,
            "a torchtitan checkpoint does not state the sliding window, and torchtitan's own models of this "
            f"class use {_TITAN_WINDOW}",
            severity="warning",
            file=file,
            expected=f"sliding_window_size={model.window} in the code of the run",
            got=f"{model.word('window', 'sliding_window')} is {model.window}",
            help="copy torchtitan's config of the model, and set sliding_window_size in it",
        )
    ]


def _warn_of_routing(model: Model, file: str) -> list[Finding]:
    experts = model.experts
    if experts is None or experts.normalised:
        return []
    return [
        Finding.of(
            codes.NOT_PROVABLE,
            "a torchtitan checkpoint does not state the router's settings, and torchtitan's own models of "
            "this class normalise the weights of the chosen experts",
            severity="warning",
            file=file,
            # source: torchtitan models/{qwen3,deepseek_v3}/__init__.py
            expected="route_norm=False in the code of the run",
            got=f"{model.word('experts.normalised', 'norm_topk_prob')} is false",
            help="copy torchtitan's config of the model, and set route_norm=False in it",
        )
    ]
