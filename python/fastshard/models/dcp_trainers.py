"""What the models of torchtitan and OLMo-core compute. The run's own code has their settings, no checkpoint.

source: torchtitan 0.3.0 models/{llama3,qwen3,deepseek_v3}, models/common/{rope,moe,feed_forward}.py;
OLMo-core nn/{rope,feed_forward,attention}
"""

from __future__ import annotations

from ..common import codes
from ..common.config_text import shown
from ..common.errors import Finding
from ..common.records import dataclass, replace
from ..layouts import naming_schemes
from . import unsupported
from .model import Lack, Model, Rope
from .unsupported import Says

#: torchtitan has two rotary embeddings: one scales as Llama 3.1 does, the other goes with normed queries.
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
_OLMO_CORE = Says(
    kind="Llama",
    activations=("silu", "gelu_pytorch_tanh"),
    scalings=("default", "linear", "llama3", "yarn"),
    window=True,
    qk_norm=(False, True),
)


@dataclass(frozen=True)
class Trainer:
    """A trainer whose checkpoints state no settings."""

    kinds: tuple[Says, ...]
    #: What its own state says or its rows are arranged by, though transformers has a key for it.
    covered: tuple[str, ...] = ()


_TRAINERS = {
    "torchtitan": Trainer(
        (_TITAN_LLAMA, _TITAN_QWEN, _TITAN_QWEN_MOE, _TITAN_DEEPSEEK), covered=("rope_interleave",)
    ),
    # Its windows follow a pattern of layers. source: OLMo-core nn/attention (SlidingWindowAttentionConfig)
    "olmo_core": Trainer((_OLMO_CORE,), covered=("sliding window in some layers",)),
}


def refuse(spelling: str, model: Model) -> None:
    """Refuse a model that the trainer does not compute.

    Args:
        spelling: the trainer, as in the names of its tables.
        model: what is to be computed.

    Raises:
        FastshardError: ``FS514``, one finding for each reason.
    """
    trainer, name = _TRAINERS[spelling], naming_schemes.framework(spelling)
    others = tuple(lack for lack in model.others if lack.what not in trainer.covered)
    unsupported.refuse(name, trainer.kinds, replace(model, others=others))
    if spelling == "torchtitan" and (lacking := _list_lacks_of_yarn(model.rope)):
        near = next(kind for kind in trainer.kinds if model.family in kind.families)
        raise unsupported.refused(name, near, lacking)


def _list_lacks_of_yarn(rope: Rope) -> list[Lack]:
    """List what YaRN has and torchtitan's lacks: it scales attention by one number, and rotations by none.

    source: torchtitan models/deepseek_v3/model.py (softmax_scale), models/common/rope.py (_yarn_inv_freq);
    transformers modeling_rope_utils.py (_compute_yarn_parameters)
    """
    if rope.kind != "yarn":
        return []
    scaling = {key: value for key, value in rope.scaling.items() if value is not None}
    every, some, factor = (scaling.get(key) for key in ("mscale_all_dim", "mscale", "attention_factor"))
    if factor is not None:
        return [] if factor == 1 else [Lack("rope_scaling (attention_factor)", "1", shown(factor))]
    if not every:
        return [Lack("rope_scaling (mscale_all_dim)", "a number", shown(every))]
    return [] if every == some else [Lack("rope_scaling (mscale)", shown(every), shown(some))]


def warn_of_routing(spelling: str, model: Model, file: str) -> list[Finding]:
    """Warn of weights of experts that the run's own code must leave as they are: no tensor shows it.

    Args:
        spelling: the trainer, as in the names of its tables.
        model: what is to be computed.
        file: the config.json beside the result.
    """
    experts = model.experts
    if spelling != "torchtitan" or experts is None or experts.normalised:
        return []
    return [
        Finding.of(
            codes.NOT_PROVABLE,
            "torchtitan states no setting of its router in a checkpoint, and its own models of this class "
            "norm the weights of the chosen experts",
            severity="warning",
            file=file,
            # source: torchtitan models/{qwen3,deepseek_v3}/__init__.py
            expected="route_norm=False in the code of the run",
            got=f"{model.word('experts.normalised', 'norm_topk_prob')} is false",
            help="copy torchtitan's config of the model, and set route_norm=False in it",
        )
    ]
