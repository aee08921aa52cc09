"""Words in names of tensors, over all frameworks: the one list of what tells a role where no table has a rule for it."""

from __future__ import annotations

#: Most are declared to the core, with each checkpoint (``rust/fastshard/src/words.rs`` says how each is used): in small letters; ``*``
#: at an end stands for anything; with ``_`` a part of a name between dots is meant, as it is spelled, else a word of one.
WORDS: dict[str, tuple[str, ...]] = {
    # Tables of the vocabulary, of something else, and such as lie at unusual places.
    "tables": ("embed", "embedding", "embeddings", "emb", "wte", "embedder", "vocab"),
    "other_tables": ("position", "positions", "positional", "pos", "time", "type", "segment", "rel", "relative"),
    "shared_tables": ("shared",),
    "further_tables": ("*embed_tokens*",),
    "heads": (
        "head", "output", "out", "final", "logits", "softmax", "unembed", "unembedding", "decoder", "*lm_head*",
    ),
    "further_heads": ("*shared_head*",),
    "inside_heads": ("decoder",),
    "projections": (
        "dense", "query", "key", "value", "qkv", "q", "k", "v", "o", "wq", "wk", "wv", "wo", "wi", "w1", "w2", "w3", "fc",
        "fc1", "fc2", "*proj*",
    ),
    "experts": ("expert*", "*moe*"),
    "layers": ("layer*", "block*", "h"),
    # Paxml's optimizers begin with the last.
    "states": ("opt*", "no_prefix*"),
    "parameters": ("weight", "bias"),
    "biases": ("bias",),
    "buffers": (
        "rotary", "rope", "freq", "freqs", "sinusoid", "sinusoidal", "sin", "cos", "pos", "pe", "positional", "position",
        "positions", "ids", "index", "alibi", "slopes", "mask", "alphas", "betas",
    ),
    "periodic": ("rotary", "rope", "freq", "freqs", "sin", "cos", "ids", "alibi", "mask", "sinusoid"),
    # source: register_buffer in transformers models/{gpt2,gptj,gpt_neo,gpt_neox,mpt,bloom}
    "computed": (
        "*mask*", "*inv_freq*", "*rotary*", "*alibi*", "*slopes*", "*cos_cached*", "*sin_cached*", "position_bias",
    ),
    "learned": (
        "weight", "weights", "kernel", "bias", "proj", "linear", "table", "embedding", "embeddings", "embed", "embeds", "emb",
        "rel", "relative", "var", "w", "b", "u", "v", "gate", "up", "down",
    ),
    "zeros": (
        "ln", "rel", "relative", "position", "positions", "positional", "pos", "time", "type", "b", "scale", "shift", "mask",
        "*norm*", "*bias",
    ),
    "zero_factors": ("*lora_B*",),
    "tokens": ("token", "tokens"),
    "moments": (
        "mu", "nu", "m", "v", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "trace", "velocity",
    ),
    "copies": (
        "ema", "avg", "average", "averaged", "momentum", "target", "ref", "reference", "teacher", "student", "shadow", "swa",
        "polyak", "policy", "actor", "critic", "reward", "original", "old", "copy", "online",
    ),
    "averages": ("*exp_avg*",),
    "followers": ("_m",),
    # What Python alone asks for: modules whose rows are the vocabulary; parts of names of what is stored once for two; and what no
    # model has below a part that it calls "model".
    "embedding_modules": ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared"),
    "head_modules": ("lm_head", "embed_out"),
    "tied": ("embed", "wte", "shared", "lm_head", "output"),
    # Last parts of names of what routes tokens or integrates states, which models compute in float32 and a narrower dtype rounds.
    "kept": ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias"),
    "tops": ("model", "transformer", "lm_head", "embed_out", "gpt_neox", "bert", "roberta"),
}  # fmt: skip
_OWN = frozenset(("embedding_modules", "head_modules", "tied", "kept", "tops"))


def declared() -> dict[str, tuple[str, ...]]:
    """The words that the core takes."""
    return {kind: words for kind, words in WORDS.items() if kind not in _OWN}
