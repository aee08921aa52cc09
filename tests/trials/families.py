"""Models of many families as transformers saves them: none may be accused of anything, refused or warned of.

    python tests/trials/families.py --count 40 --folder /dev/shm/families

A small model of each family of causal language models that transformers can make without a download, and with
other heads or none, with random weights in every tensor, saved as one file and in shards, as safetensors and
as torch files: verified, merged and converted. With --few each family has one head and one form.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import fastshard
import torch
import transformers
from fastshard.expected import transformers_process, transformers_worker
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SMALL = {
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "num_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_positions": 64,
    "max_position_embeddings": 64,
    "vocab_size": 160,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "decoder_layers": 3,
    "encoder_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


#: Heads that a family may have.
HEADS = {
    "causal": transformers.AutoModelForCausalLM,
    "none": transformers.AutoModel,
    "classification": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "questions": transformers.AutoModelForQuestionAnswering,
}


def ask_transformers_here(cache: Path) -> None:
    """Has transformers asked in this process, with a cache of its own: an import of torch takes longer than
    the question."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    # The tests turn it off.
    os.environ.pop("FASTSHARD_TRANSFORMERS", None)

    def answer(question: dict[str, Any], *_: object) -> Any:
        return json.loads(json.dumps(transformers_worker.answer_to(question)))

    transformers_process.answer_of = answer  # type: ignore[assignment]


def name_families(seed: int | None) -> list[str]:
    """Lists the families of causal language models, by name or in an order of the seed."""
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if seed is not None:
        random.Random(seed).shuffle(names)
    return names


def made(model_type: str, head: Any) -> Any:
    """A small model; None where the family cannot be made so."""
    with contextlib.suppress(Exception):
        config = transformers.AutoConfig.for_model(model_type)
        for key, value in SMALL.items():
            if hasattr(config, key):
                setattr(config, key, value)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:3]
        with torch.device("meta"):
            size = sum(p.numel() for p in head.from_config(config).parameters())
        if size > 20_000_000:
            return None
        torch.manual_seed(0)
        model = head.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.config.validate()
        return model
    return None


def accused(path: Path) -> list[str]:
    """Errors and warnings of verifying, merging and converting, one line each."""
    said: list[fastshard.Finding] = []
    for to in ("verify", None, "hf"):
        out = path.with_name(f"{path.name}-out")
        shutil.rmtree(out, ignore_errors=True)
        try:
            said += (
                fastshard.verify(path)
                if to == "verify"
                else fastshard.convert(path, out, to, fsync=False).findings
            )
        except fastshard.FastshardError as error:
            said += error.findings
        shutil.rmtree(out, ignore_errors=True)
    # A config that promises MTP layers is saved without them by every transformers.
    return [
        f"{f.code} {f.severity}: {f.message}" for f in said if f.severity != "note" and not is_mtp_left_out(f)
    ]


def is_mtp_left_out(finding: fastshard.Finding) -> bool:
    return finding.code == "FS116" and finding.severity == "warning" and " MTP layer" in finding.message


def as_torch_files(place: Path, model: Any, most: str) -> None:
    """Puts `pytorch_model*.bin` in the place of the safetensors files, as transformers before 5 saved
    them."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(place.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (place / "model.safetensors.index.json").unlink(missing_ok=True)
    # Tied ones are there under each of their names, in one storage.
    for name, of in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if of in tensors:
            tensors.setdefault(name, tensors[of])
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=most
    )
    for file_name, names in split.filename_to_tensors.items():
        torch.save({name: tensors[name] for name in names}, place / file_name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (place / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=40, metavar="N", help="families (default: 40)")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "families", metavar="DIR"
    )
    parser.add_argument("--seed", type=int, help="take families at random (default: by name)")
    parser.add_argument("--few", action="store_true", help="one head and one form of each")
    a = parser.parse_args()
    ask_transformers_here(a.folder.with_name(f"{a.folder.name}-cache"))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tried: dict[str, list[str]] = {}
    bad = 0
    heads = {"causal": HEADS["causal"]} if a.few else HEADS
    forms = (
        [("100KB", "safetensors")]
        if a.few
        else list(itertools.product(("1GB", "100KB"), ("safetensors", "bin")))
    )
    for model_type in name_families(a.seed):
        if len(tried) == a.count:
            break
        for head, kind in heads.items():
            model = made(model_type, kind)
            if model is None:
                continue
            tried.setdefault(model_type, []).append(head)
            for shards, form in forms:
                place = a.folder / f"{model_type}-{shards}-{form}"
                shutil.rmtree(place, ignore_errors=True)
                model.save_pretrained(place, max_shard_size=shards)
                if form == "bin":
                    as_torch_files(place, model, shards)
                for line in accused(place):
                    bad += 1
                    print(f"{model_type}, head {head}, {form} in shards of {shards}: {line}")
                shutil.rmtree(place)
    models = sum(map(len, tried.values()))
    print(f"{len(tried)} families, {models} models, accused: {bad}: {' '.join(tried)}")
    shutil.rmtree(a.folder, ignore_errors=True)
    return 1 if bad or len(tried) < a.count else 0


if __name__ == "__main__":
    sys.exit(main())
