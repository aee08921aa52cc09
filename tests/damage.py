"""Checkpoints with one thing wrong, made of good fixtures by what happens to files: ``python tests/damage.py
CASE OUT``."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastshard.cli import main
from helpers import FIXTURES, edit_pt, edit_safetensors, flip_bit, layer_file, load_pt, rank_file

#: Changes the copy at a root.
Damage = Callable[[Path], object]
#: Changes what a file holds.
Change = Callable[[Any], object]
#: Token ids of a text.
TOKENS = json.dumps([7 * number % 100 for number in range(40)])


def lost(pattern: str) -> Damage:
    def apply(root: Path) -> None:
        found = sorted(root.glob(pattern))
        assert found, pattern
        for path in found:
            path.unlink()

    return apply


def cut(name: str) -> Damage:
    """At 60 %."""

    def apply(root: Path) -> None:
        whole = (root / name).read_bytes()
        (root / name).write_bytes(whole[: len(whole) * 3 // 5])

    return apply


def over(source: str, name: str) -> Damage:
    """A file copied over another."""
    return lambda root: shutil.copyfile(root / source, root / name)


def swapped(one: str, other: str) -> Damage:
    def apply(root: Path) -> None:
        (root / one).rename(root / "aside")
        (root / other).rename(root / one)
        (root / "aside").rename(root / other)

    return apply


def flipped(name: str, part: float = 0.5) -> Damage:
    return lambda root: flip_bit(root / name, int((root / name).stat().st_size * part))


def says(name: str, text: str) -> Damage:
    return lambda root: (root / name).write_text(text)


def sliced(name: str, tensor: str, parts: int) -> Damage:
    """One rank's rows, saved as all of them; they are padded to a multiple of 64 times the ranks."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        rows = -(-len(tensors[tensor]) // (64 * parts)) * 64
        tensors[tensor] = tensors[tensor][:rows]

    return lambda root: edit_safetensors(root / name, change)


def edited(name: str, *changes: Change) -> Damage:
    """What a file holds, changed: tensors, a document, or what torch has saved."""
    by_suffix = {".safetensors": edit_safetensors, ".pt": edit_pt, ".json": _edit_json}
    edit = by_suffix.get(Path(name).suffix, _edit_pickle)
    return lambda root: [edit(root / name, change) for change in changes]


def _edit_json(file: Path, change: Change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _edit_pickle(file: Path, change: Change) -> None:
    content = pickle.loads(file.read_bytes())
    change(content)
    file.write_bytes(pickle.dumps(content))


def put(*keys: str, **values: object) -> Change:
    """Values of a dictionary, below the keys."""

    def change(content: Any) -> None:
        for key in keys:
            content = content[key]
        content.update(values)

    return change


def held(name: str, value: object) -> Change:
    """A tensor, added or replaced."""
    return lambda content: content.update({name: value})


def mapped(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A tensor, replaced by what is made of it."""
    return lambda content: content.update({name: change(content[name])})


def copied(source: str, name: str) -> Change:
    """A tensor, replaced by another one of the file."""
    return lambda content: content.update({name: content[source].clone()})


def filled(name: str, rows: slice, value: float) -> Change:
    return lambda content: content[name][rows].fill_(value)


def in_turn(*damages: Damage) -> Damage:
    return lambda root: [damage(root) for damage in damages]


def beside(name: str, text: str) -> Damage:
    """A file beside the checkpoint."""
    return lambda root: root.with_name(name).write_text(text)


def second(name: str, other: str) -> Damage:
    """A copy of a folder, under another name."""
    return lambda root: shutil.copytree(root / name, root / other)


def recorded(root: Path) -> None:
    """A manifest of it, in it."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["manifest", str(root), "--no-settings", "--memory", "4GiB", "--quiet"]) == 0


def signed(root: Path) -> None:
    """A signature by a new key, both beside it."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    key, secret = ec.generate_private_key(ec.SECP256R1()), root.with_name("signer.key")
    secret.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    root.with_name("signer.pem").write_bytes(public)
    signer = import_module("model_signing.signing").Config().use_elliptic_key_signer(private_key=secret)
    signer.sign(root, root.with_name("model.sig"))


def without_checksums(pattern: str) -> Damage:
    """Torch files, saved again without checksums."""

    def apply(root: Path) -> None:
        torch.serialization.set_crc32_options(False)
        try:
            for path in root.glob(pattern):
                torch.save(load_pt(path), path)
        finally:
            torch.serialization.set_crc32_options(True)

    return apply


def prefixed(prefix: str) -> Change:
    """Names that begin with a trainer's key."""

    def apply(content: dict[str, Any]) -> None:
        for name in [*content]:
            content[prefix + name] = content.pop(name)

    return apply


def unwritten(name: str) -> Damage:
    """A file alone, with a tensor of 2 GiB whose data nobody wrote."""

    def damage(root: Path) -> None:
        for file in root.iterdir():
            file.unlink()
        header = json.dumps(
            {"w": {"dtype": "F32", "shape": [1 << 15, 1 << 14], "data_offsets": [0, 2 << 30]}}
        )
        with (root / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header.encode())
            file.truncate(8 + len(header) + (2 << 30))

    return damage


def rezipped(name: str, member: str, change: Callable[[bytes], bytes]) -> Damage:
    """A torch file of which the archive is good, and what one of its members holds is changed."""

    def damage(root: Path) -> None:
        with zipfile.ZipFile(root / name) as file:
            held = {one: file.read(one) for one in file.namelist()}
        with zipfile.ZipFile(root / name, "w") as file:
            for one, data in held.items():
                file.writestr(one, change(data) if one.endswith(member) else data)

    return damage


def replaced(name: str, old: bytes, new: bytes) -> Damage:
    """Bytes of a file, changed where they occur first."""
    return lambda root: (root / name).write_bytes((root / name).read_bytes().replace(old, new, 1))


def linked(name: str) -> Damage:
    """A file that is a link to where it was moved, beside the checkpoint."""

    def damage(root: Path) -> None:
        (root / name).rename(root.with_name(name))
        (root / name).symlink_to(f"../{name}")

    return damage


def interrupted(root: Path) -> None:
    """A run whose parts were never made."""
    with contextlib.redirect_stdout(io.StringIO()):
        words = ["split", str(root), str(root.with_name("out")), "--parts", "2", "--emit", "shell"]
        assert main([*words, "--no-settings", "--memory", "4GiB"]) == 0


def none(root: Path) -> None:
    """Nothing: it is a fixture that is wrong as it lies there."""


NEOX, TP4, HF = "gpt_neox/neox_pp_tp2", "sharded/tp4_micro", "sharded/hf_sharded"
ZERO, ZERO3 = "deepspeed/zero1_bf16_dp2", "deepspeed/zero3_bf16_dp2"
LEGACY, DIST = "sharded/megatron_legacy_tp2_pp2", "sharded/megatron_torch_dist_tp2_pp2"
DCP, COLOSSAL = "sharded/dcp_tp_micro", "sharded/colossalai_049_tp2_pp2/modeling"
OPTIM = "global_step4/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
LAYER = "maxtext_twins/a_mt_bf16_unscan_noocdbt_zarr2"

#: name -> (fixture, what happens to it)
CASES: dict[str, tuple[str, Damage]] = {
    "neox_missing_shard": (NEOX, lost(f"*/{layer_file(3, 1)}")),
    "neox_missing_layer": (NEOX, lost("*/layer_04-*")),
    "neox_truncated": (NEOX, cut(f"global_step4/{layer_file(2, 1)}")),
    "neox_bit_flipped": (NEOX, flipped(f"global_step4/{layer_file(3, 0)}")),
    "neox_copied_shard": (NEOX, over(f"global_step4/{layer_file(3, 0)}", f"global_step4/{layer_file(3, 1)}")),
    "neox_swapped_ranks": (
        NEOX,
        swapped(f"global_step4/{layer_file(3, 0)}", f"global_step4/{layer_file(3, 1)}"),
    ),
    "neox_no_config": (NEOX, lost("*/configs/*.yml")),
    "neox_latest_points_nowhere": (NEOX, says("latest", "global_step9")),
    "neox_norms_drifted": ("gpt_neox/neox_pp_tp2_normdiverged", none),
    "neox_sequential_missing_rank": ("gpt_neox/neox_seq_tp2", lost(f"*/{rank_file(1)}")),
    "zero1_missing_rank": (ZERO, lost(OPTIM.format(1))),
    "zero1_truncated": (ZERO, cut(OPTIM.format(1))),
    "zero1_copied_rank": (ZERO, over(OPTIM.format(0), OPTIM.format(1))),
    "zero1_stale_masters": ("stale_masters_zero1_bf16_dp2", none),
    "zero3_missing_rank": (ZERO3, lost("*/*rank_1_*")),
    "universal_missing_parameter": ("universal/zero1_bf16_dp2", lost("*/zero/embed.weight/fp32.pt")),
    "megatron_missing_rank": (LEGACY, lost("*/mp_rank_01_001/*")),
    "megatron_copied_rank": (
        LEGACY,
        over(
            "iter_0000010/mp_rank_00_000/model_optim_rng.pt", "iter_0000010/mp_rank_01_000/model_optim_rng.pt"
        ),
    ),
    "torch_dist_missing_file": (DIST, lost("*/__3_1.distcp")),
    "dcp_no_metadata": (DCP, lost(".metadata")),
    "dcp_missing_file": (DCP, lost("__1_0.distcp")),
    "dcp_truncated": (DCP, cut("__1_0.distcp")),
    "tp_missing_rank": (TP4, lost("tp_rank_02*")),
    "tp_copied_rank": (TP4, over("tp_rank_00.safetensors", "tp_rank_01.safetensors")),
    "tp_truncated": (TP4, cut("tp_rank_01.safetensors")),
    "tp_no_layout_no_config": (TP4, lost("*.json")),
    "hf_missing_file": (HF, lost("model-00003-of-00004.safetensors")),
    "hf_copied_file": (HF, over("model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors")),
    "hf_embed_is_a_slice": (HF, sliced("model-00001-of-00004.safetensors", "model.embed_tokens.weight", 4)),
    "hf_index_is_no_json": (HF, says("model.safetensors.index.json", "{")),
    "colossalai_missing_stage": (COLOSSAL, lost("model-stage-00002*")),
    "colossalai_no_index": (COLOSSAL, lost("model.safetensors.index.json")),
    "maxtext_missing_chunk": (LAYER, lost("0/items/*layers_1.mlp.wo.kernel/0.0")),
    "maxtext_missing_array": (LAYER, lost("0/items/*layers_1.mlp.wo.kernel/.zarray")),
    "orbax_lone_host": ("orbax/mp2_local_BROKEN_063_zarr3/node0", none),
    "orbax_lone_host_that_is_not_primary": ("orbax/mp2_local_BROKEN_0128_zarr3_primarynone/node1", none),
    "paxml_missing_chunk": ("orbax/paxml_gpt3_micro_weights", lost("*/*/state/*linear.w/0.1.0")),
}


class Example(NamedTuple):
    """A command that shows a code, and what it is about."""

    #: Name of the copy.
    name: str
    fixture: str
    damage: Damage
    command: str


DRIFTED, PAXML = "gpt_neox/neox_pp_tp2_normdiverged", "orbax/paxml_gpt3_micro_weights"
NEOX_SEQ, RANK_1 = "gpt_neox/neox_seq_tp2", f"global_step4/{rank_file(1)}"
LAYER_3, LINEAR = f"global_step4/{layer_file(3, 1)}", "mlp.linear1.weight"
MODEL_STATES = "global_step4/zero_pp_rank_{}_mp_rank_00_model_states.pt"
SHARD, INDEX = "model-0000{}-of-00004.safetensors", "model.safetensors.index.json"
TP_RANK, PAD = "tp_rank_0{}.safetensors", slice(-6, None)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BLOCK, BUFFER = "model.layers.{}.{}.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
Q, UP = BLOCK.format(1, "self_attn.q_proj"), BLOCK.format(1, "mlp.up_proj")
IN_FIRST = EMBED, BLOCK.format(0, "self_attn.q_proj")  # the tensors of the first shard
NORMS = BLOCK.format(0, "input_layernorm"), BLOCK.format(1, "input_layernorm")
PADDED = edited(TP_RANK.format(3), filled(EMBED, PAD, 0.5), filled(HEAD, PAD, 0.5))
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a21' * 10}4d7a\nsize 128096\n"
OWN = """layout = "own"
family = "own"
keep = ["model.*"]
[sets]
moe = "L in moe_layers"
[[tensor]]
name = "lm_head.weight"
shape = "[L in moe, H]"
"""

#: What shows the codes that no case shows first, for their pages.
EXAMPLES: dict[str, Example] = {
    "FS107": Example("run", NEOX_SEQ, edited(RANK_1, put(iteration=3)), "verify run"),
    "FS108": Example("model", HF, over(SHARD.format(4), "model-00001-of-00007.safetensors"), "verify model"),
    "FS109": Example("run", PAXML, none, "verify run -v"),
    "FS110": Example("run", NEOX_SEQ, edited(RANK_1, put("args", hidden_size=64)), "verify run"),
    "FS112": Example("run", NEOX, second("global_step4", "global_step2"), "verify run -v"),
    "FS114": Example("run", TP4, none, "verify run -v"),
    "FS115": Example(
        "model",
        HF,
        edited(INDEX, put("weight_map", **dict.fromkeys(IN_FIRST, SHARD.format(4)))),
        "verify model",
    ),
    "FS116": Example("model", HF, edited("config.json", put(num_nextn_predict_layers=1)), "verify model"),
    "FS117": Example("model", HF, second(".", "../original"), "merge model out --fill-from original"),
    "FS118": Example("run", TP4, none, f"merge run/{TP_RANK.format(0)} out"),
    "FS119": Example(
        "model",
        HF,
        in_turn(
            *(edited(SHARD.format(n), prefixed("policy.")) for n in range(1, 5)),
            edited(
                INDEX, lambda c: c.update(weight_map={f"policy.{n}": f for n, f in c["weight_map"].items()})
            ),
        ),
        "verify model",
    ),
    "FS201": Example("run", NEOX, edited(LAYER_3, mapped(LINEAR, lambda t: t[:32])), "verify run"),
    "FS202": Example("run", NEOX, edited(LAYER_3, mapped(LINEAR, torch.Tensor.float)), "verify run"),
    # Where no config states a size, the tensors alone do; without the vocabulary's, padding looks like a lost
    # part.
    "FS203": Example(
        "run",
        TP4,
        in_turn(
            lost("config.json"),
            PADDED,
            edited("layout.json", lambda c: [c.pop(key) for key in [*c] if "vocab" in key]),
            edited(TP_RANK.format(2), mapped(UP, lambda t: t[:, :24])),
        ),
        "verify run",
    ),
    "FS204": Example("model", HF, none, "convert model out --to tp-safetensors --tp 8"),
    "FS205": Example(
        "run", DCP, edited(".metadata", lambda m: m.state_dict_metadata[EMBED].chunks.pop()), "verify run"
    ),
    "FS206": Example("model", HF, edited(SHARD.format(4), held(Q, torch.ones(64, 64))), "verify model"),
    "FS207": Example("run", NEOX, edited(LAYER_3, held("attention.lora_a", torch.ones(4, 8))), "verify run"),
    "FS210": Example(
        "model", HF, beside("own.toml", OWN.replace("shape", "shapes")), "verify model --layout own.toml"
    ),
    "FS212": Example(
        "model",
        HF,
        in_turn(
            edited(SHARD.format(4), held(BUFFER, torch.ones(4))),
            edited(INDEX, put("weight_map", **{BUFFER: SHARD.format(4)})),
        ),
        "convert model out --to hf -v",
    ),
    "FS213": Example("model", HF, beside("own.toml", OWN), "verify model --layout own.toml"),
    "FS214": Example("model", HF, none, "convert model out --to hf --dtype f16 -v"),
    "FS215": Example("model", HF, edited("config.json", put(num_hidden_layers=3)), "verify model"),
    "FS216": Example("model", LAYER, none, "convert model out --to hf"),
    "FS304": Example(
        "run",
        TP4,
        in_turn(
            *(edited(TP_RANK.format(rank), copied(BLOCK.format(0, "mlp.up_proj"), UP)) for rank in range(4)),
        ),
        "verify run",
    ),
    # Copies that differ are looked into where they are averaged.
    "FS305": Example("run", TP4, edited(TP_RANK.format(2), copied(*NORMS)), "merge run out --replicas mean"),
    "FS306": Example(
        "run", TP4, edited(TP_RANK.format(2), filled(HEAD, slice(1), float("nan"))), "verify run"
    ),
    "FS307": Example("run", TP4, PADDED, "verify run"),
    "FS308": Example("model", HF, in_turn(recorded, flipped(SHARD.format(4))), "verify model"),
    "FS309": Example(
        "model",
        HF,
        in_turn(
            second(".", "../other"),
            edited(SHARD.format(4), filled(HEAD, slice(1), 0.0)),
        ),
        "diff model other -v",
    ),
    "FS310": Example("run", DRIFTED, none, "merge run out --replicas mean"),
    "FS311": Example("model", HF, edited("config.json", put(tie_word_embeddings=True)), "verify model"),
    "FS313": Example("model", HF, edited(SHARD.format(2), filled(UP, slice(48, None), 0.0)), "verify model"),
    "FS314": Example("run", NEOX, without_checksums("*/layer_03-*"), "verify run -v"),
    "FS315": Example(
        "model",
        HF,
        in_turn(
            signed,
            says("modeling.py", ""),
        ),
        "verify model --signature model.sig --public-key signer.pem",
    ),
    "FS316": Example("model", HF, says(SHARD.format(4), LFS), "verify model"),
    "FS317": Example("model", HF, unwritten(SHARD.format(4)), "merge model out"),
    "FS318": Example("model", HF, says("../tokens.json", TOKENS), "loss model --tokens tokens.json"),
    "FS319": Example(
        "model", HF, says("../tokens.json", TOKENS), "loss model --tokens tokens.json --expect-loss 2.77"
    ),
    "FS320": Example(
        "model",
        HF,
        in_turn(
            says("../tokens.json", TOKENS),
            second(".", "../other"),
            edited(SHARD.format(4), filled(HEAD, slice(1), 0.0)),
        ),
        "layers other model --tokens tokens.json",
    ),
    # Of stage 3, whose files hold the weights once.
    "FS402": Example("run", ZERO3, none, "master-weights run"),
    "FS403": Example("run", ZERO, none, "verify run -v"),
    "FS404": Example(
        "run",
        ZERO3,
        in_turn(
            *(
                edited(
                    MODEL_STATES.format(rank),
                    lambda c: c["param_shapes"][0].update({"up.weight": torch.Size([41, 24])}),
                )
                for rank in range(2)
            )
        ),
        "verify run",
    ),
    # What stops a run, as far as it happens without another process, a signal, a full disk or other rights.
    "FS501": Example("model", HF, none, "verify modle"),
    "FS504": Example(
        "model", HF, in_turn(second(".", "../out"), lost("../out/*.safetensors")), "merge model out"
    ),
    "FS505": Example("model", HF, none, "convert model model/out --to hf"),
    "FS507": Example("model", HF, beside("notes.txt", "mine"), "merge model notes.txt/out"),
    "FS508": Example("model", HF, interrupted, "merge model out"),
    "FS513": Example("model", HF, lost("*"), "verify model"),
    "FS514": Example("run", PAXML, none, "convert run out --to hf"),
    "FS515": Example("model", HF, none, f"trace model {UP.removesuffix('.weight')}"),
    "FS518": Example("model", HF, in_turn(recorded, says("fastshard.manifest.json", "{")), "verify model"),
    "FS601": Example("model", HF, replaced(SHARD.format(4), b"{", b"["), "verify model"),
    "FS602": Example("run", NEOX, rezipped(LAYER_3, "data.pkl", lambda data: data[:500]), "verify run"),
    "FS603": Example("model", HF, linked(SHARD.format(4)), "verify model"),
    "FS604": Example("run", NEOX, replaced(LAYER_3, b"PK\x01\x02", b"PK\x00\x00"), "verify run"),
}


def made(name: str, root: Path) -> Path:
    """One of the cases, without the answers of its fixture."""
    return _copied(*CASES[name], root)


def shown(code: str, folder: Path) -> str:
    """Makes an example in a folder; the words of its command."""
    name, fixture, damage, command = EXAMPLES[code]
    _copied(fixture, damage, folder / name)
    return command


def _copied(fixture: str, damage: Damage, root: Path) -> Path:
    shutil.copytree(FIXTURES / fixture, root, ignore=shutil.ignore_patterns("expected*.json", "holes.json"))
    damage(root)
    return root


if __name__ == "__main__":
    made(sys.argv[1], Path(sys.argv[2]))
