"""Lists of expected tensors against what `save_pretrained` writes, for every family that transformers builds
small.

    python tests/trials/expected.py               # all families: minutes
    python tests/trials/expected.py --count 20    # some of them

Each family is built from its default config with few and narrow layers and saved. The list of the saved
config.json must have the names, shapes and dtypes of the files. `verify` by itself must accept the save,
under the names on disk and, as a trainer saves them, under those in memory; it must find each of some damages
in both. Where the names in memory are others, a save under these is converted with the config and must have
the names and the values of `save_pretrained`. Prints a line for each difference and a table; the exit code is
1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import fastshard
import torch
import torch.distributed.checkpoint as dcp
import transformers
from fastshard.expected import (
    cached_lists,
    expected_list,
    from_transformers,
    transformers_process,
    transformers_worker,
)
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.models.auto import modeling_auto

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
SMALL = {
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "num_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
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
    "depth": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Parameters of a model that is built with storage at most.
MOST = 60_000_000


def shrink(config: Any) -> None:
    """Few and narrow layers, in the configs of parts too."""
    for key, value in SMALL.items():
        if type(getattr(config, key, None)) is int:
            setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: SMALL["num_hidden_layers"]]
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None and not isinstance(part, dict):
            shrink(part)


def made(model_type: str, name: str) -> tuple[Any, str]:
    """A small model of a class, or the default one where that cannot be built small; None and why not."""
    cls = getattr(transformers, name, None)
    if cls is None or not hasattr(cls, "_from_config"):
        return None, "no such class without other packages"
    why = ""
    for small in (True, False):
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
            if small:
                shrink(config)
                # As a config that was saved: parts follow from one another.
                config = type(config).from_dict(config.to_dict())
            with torch.device("meta"):
                size = sum(p.numel() for p in cls._from_config(config).parameters())
            if size > MOST:
                raise ValueError("too large")
            torch.manual_seed(0)
            model = cls._from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            return model, "small" if small else "default"
        except Exception as error:
            why = why or f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
    return None, why


def stored(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """What the files hold, by their headers."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


def listed(folder: Path) -> expected_list.ExpectedTensors:
    """The list of a saved config, made in this process."""
    config = json.loads((folder / "config.json").read_text())
    asked = {"config": from_transformers.cleaned(config), "class": config["architectures"][0]}
    told = transformers_worker.listed(asked)
    return expected_list.from_document(expected_list.document_of(told), str(folder))


def differences(list_: expected_list.ExpectedTensors, files: dict[str, tuple[str, list[int]]]) -> list[str]:
    """What a list and files differ in."""
    promised = {t.name: (t.dtype, list(t.shape)) for t in list_}
    found = [f"not listed: {name}" for name in files.keys() - promised.keys()]
    found += [f"not stored: {name}" for name in promised.keys() - files.keys()]
    found += [
        f"{n}: {promised[n]}, stored {files[n]}"
        for n in files.keys() & promised.keys()
        if promised[n] != files[n]
    ]
    return sorted(found)


def damages(tensors: dict[str, Any], ties: set[str]) -> dict[str, dict[str, Any]]:
    """Damaged copies of a model's tensors, by what was done."""
    names = sorted(
        name for name in tensors if name not in ties and not name.endswith(("inv_freq", "position_ids"))
    )
    even = [
        n
        for n in names
        if tensors[n].ndim == 2 and tensors[n].shape[0] % 2 == 0 and min(tensors[n].shape) > 1
    ]
    oblong = [n for n in even if tensors[n].shape[0] != tensors[n].shape[1]]
    found = {}
    for count in (1, 3, 8):
        if len(names) > 3 * count:
            lost = set(names[len(names) // 2 :: max(1, len(names) // (2 * count))][:count])
            found[f"{count} removed"] = {n: t for n, t in tensors.items() if n not in lost}
    if even:
        name = even[len(even) // 2]
        found["halved"] = tensors | {name: tensors[name][: len(tensors[name]) // 2]}
    if oblong:
        name = oblong[len(oblong) // 2]
        found["transposed"] = tensors | {name: tensors[name].T}
    experts = [n for n in names if ".experts.1." in n]
    if experts:
        found["expert"] = {n: t for n, t in tensors.items() if n not in experts}
    shard = set(names[len(names) // 3 : 2 * len(names) // 3])
    found["shard"] = {n: t for n, t in tensors.items() if n not in shard}
    numbered = [n for n in names if re.search(r"\.0\.", n)]
    if numbered:
        name = numbered[len(numbered) // 2]
        other = re.sub(r"\.0\.", ".77.", name, count=1)
        found["of another layer"] = {n: t for n, t in tensors.items() if n != name} | {other: tensors[name]}
    tower = {n for n in names if re.search(r"(^|\.)(vision|visual|audio)\w*\.", n)}
    if tower and len(tower) < len(names):
        found["tower"] = {n: t for n, t in tensors.items() if n not in tower}
    return found


def errors(at: Path) -> list[str]:
    """Errors and warnings of verifying what lies there."""
    try:
        verdict = fastshard.verify(at)
    except fastshard.FastshardError as error:
        return [f"{f.code} {f}" for f in error.findings]
    # A config that promises MTP layers is saved without them by every transformers.
    return [
        f"{f.code} {f}"
        for f in verdict
        if f.severity in ("error", "warning") and not (f.code == "FS116" and " MTP layer" in f.message)
    ]


def judge(folder: Path, model: Any, caught: Counter[str]) -> list[str]:
    """What is said wrongly of good saves, and of damaged ones."""
    on_disk = content(folder)
    in_memory = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    ties = {name for group in transformers_worker.tied(model) for name in group}
    wrong = []
    for spelling, tensors in (("on disk", on_disk), ("in memory", in_memory)):
        good = folder.with_name("good")
        shutil.rmtree(good, ignore_errors=True)
        if spelling == "on disk":
            shutil.copytree(folder, good)
        else:
            dcp.save({"model": tensors}, checkpoint_id=good, no_dist=True)
            shutil.copy(folder / "config.json", good)
        wrong += [f"good save accused, names {spelling}: {said[:200]}" for said in errors(good)[:2]]
        for what, changed in damages(tensors, ties).items():
            bad = folder.with_name("bad")
            shutil.rmtree(bad, ignore_errors=True)
            bad.mkdir()
            shutil.copy(folder / "config.json", bad)
            changed = {name: tensor.contiguous().clone() for name, tensor in changed.items()}
            save_file(changed, bad / "model.safetensors", {"format": "pt"})
            caught[what] += 1
            if not errors(bad):
                wrong.append(f"{what}, names {spelling}: not found")
    return wrong


def rewritten(folder: Path, model: Any) -> list[str]:
    """What differs between a save under the names in memory, once it is converted with the config, and the
    model's own."""
    memory, out = folder.with_name("memory"), folder.with_name("out")
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=memory, no_dist=True)
    try:
        fastshard.convert(memory, out, to="hf", like=folder / "config.json")
    except fastshard.FastshardError as error:
        return [f"not rewritten: {f.code} {f}"[:300] for f in error.findings[:2]]
    want, got = content(folder), content(out)
    # Of tied tensors a trainer may save each.
    ties = {name for group in transformers_worker.tied(model) for name in group}
    found = [f"not written: {name}" for name in want.keys() - got.keys()]
    found += [f"written besides: {name}" for name in got.keys() - want.keys() - ties]
    found += [
        f"{name} differs" for name in want.keys() & got.keys() if not torch.equal(want[name], got[name])
    ]
    return sorted(found)


def content(folder: Path) -> dict[str, torch.Tensor]:
    """Names and tensors of a directory."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in folder.glob("*.safetensors")]
        return {name: one.get_tensor(name) for one in opened for name in one.keys()}  # noqa: SIM118


def ask_here() -> None:
    """Lists are made in this process: an import of torch takes seconds."""

    def answered(asked: dict[str, Any], *_: object) -> dict[str, Any]:
        try:
            told = (
                transformers_worker.loading(asked) if "stored" in asked else transformers_worker.listed(asked)
            )
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "kind": "build"}
        return json.loads(json.dumps(told))  # type: ignore[no-any-return]

    transformers_process.answer_of = answered
    cached_lists.read = lambda key: None
    cached_lists.keep = lambda key, document: None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, help="families of each kind at most")
    parser.add_argument("--only", help="one model_type")
    parser.add_argument(
        "--judge", type=int, default=12, help="families of each kind that are verified, whole and damaged"
    )
    options = parser.parse_args()
    ask_here()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts: Counter[tuple[str, str]] = Counter()
    caught: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    renamed: Counter[str] = Counter()
    failed = 0
    for kind, classes in KINDS.items():
        chosen = [(t, c) for t, c in classes.items() if options.only in (None, t)][: options.count]
        judged = 0
        for model_type, name in chosen:
            name = name[0] if isinstance(name, (list, tuple)) else name
            model, how = made(model_type, name)
            if model is None:
                counts[kind, "not built"] += 1
                reasons[how] += 1
                continue
            with tempfile.TemporaryDirectory() as work:
                folder = Path(work) / "saved"
                try:
                    model.save_pretrained(folder)
                except Exception as error:
                    counts[kind, "not saved"] += 1
                    reasons[f"save_pretrained: {type(error).__name__}: {str(error)[:80]}"] += 1
                    continue
                try:
                    list_ = listed(folder)
                    wrong = differences(list_, stored(folder))
                    if not wrong and how == "small" and judged < options.judge:
                        judged += 1
                        wrong = judge(folder, model, caught)
                    if not wrong and list_.made:
                        renamed[kind] += 1
                        wrong = rewritten(folder, model)
                except Exception as error:
                    wrong = [f"no list: {type(error).__name__}: {str(error)[:160]}"]
            counts[kind, "wrong" if wrong else "exact"] += 1
            failed += bool(wrong)
            for line in wrong[:4]:
                print(f"{kind} {model_type} {name} ({how}): {line}", flush=True)
    columns = ("exact", "wrong", "not built", "not saved")
    print("\n" + " ".join(["kind".ljust(16), *(c.rjust(10) for c in columns)]))
    for kind in KINDS:
        print(" ".join([kind.ljust(16), *(str(counts[kind, c]).rjust(10) for c in columns)]))
    print("damages tried: " + ", ".join(f"{what} {n}" for what, n in sorted(caught.items())))
    print("rewritten from names in memory: " + ", ".join(f"{kind} {n}" for kind, n in renamed.items()))
    for why, n in reasons.most_common(12):
        print(f"{n:4} not built: {why}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
