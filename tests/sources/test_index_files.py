"""Index files that lie: what transformers loads of such a folder, and what is said of it here."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import Ran, assert_refused, cli, edit_safetensors
from safetensors.torch import load_file, save_file

PAGE = Path(__file__).parents[2] / "docs/guides/index_files.md"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Q = "model.layers.2.self_attn.q_proj.weight"
Index = dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several shards, of a family that has no table."""
    folder = tmp_path_factory.mktemp("index") / "stablelm"
    torch.manual_seed(11)
    config = transformers.StableLmConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    transformers.StableLmForCausalLM(config).save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) == 6
    return folder


def shard(folder: Path, index: Index, name: str) -> Path:
    return folder / str(index["weight_map"][name])


def last(folder: Path) -> Path:
    return max(folder.glob("model-*.safetensors"))


def ghosts(folder: Path, index: Index) -> None:
    index["weight_map"]["mtp.fc.weight"] = last(folder).name


def lost(folder: Path, index: Index) -> None:
    edit_safetensors(shard(folder, index, Q), lambda tensors: tensors.pop(Q))


def unnamed(folder: Path, index: Index) -> None:
    del index["weight_map"][Q]


def gone_from_both(folder: Path, index: Index) -> None:
    lost(folder, index)
    unnamed(folder, index)


def shard_gone_from_both(folder: Path, index: Index) -> None:
    name = last(folder).name
    (folder / name).unlink()
    index["weight_map"] = {tensor: file for tensor, file in index["weight_map"].items() if file != name}


def another_file(folder: Path, index: Index) -> None:
    index["weight_map"][Q] = last(folder).name


def unnamed_file(folder: Path, index: Index) -> None:
    named, names = last(folder).name, index["weight_map"]
    index["weight_map"] = {n: named if f == names[Q] else f for n, f in names.items()}


def copied_shard(folder: Path, index: Index) -> None:
    shutil.copy(last(folder), shard(folder, index, Q))


def slice_in_file(folder: Path, index: Index) -> None:
    edit_safetensors(shard(folder, index, Q), lambda tensors: tensors.update({Q: tensors[Q][:32].clone()}))


def twice(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path, Index], None]:
    def apply(folder: Path, index: Index) -> None:
        tensor = load_file(shard(folder, index, Q))[Q]
        edit_safetensors(last(folder), lambda tensors: tensors.update({Q: change(tensor)}))

    return apply


def whole(folder: Path, *, change: float = 0.0) -> dict[str, torch.Tensor]:
    return {
        name: tensor + change
        for file in sorted(folder.glob("model-*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def single_beside(folder: Path, index: Index) -> None:
    save_file(whole(folder, change=1.0), folder / SINGLE, metadata={"format": "pt"})


def single_over(folder: Path, index: Index) -> None:
    save_file(whole(folder), folder / SINGLE, metadata={"format": "pt"})
    for file in folder.glob("model-*.safetensors"):
        file.unlink()


def counts(change: int) -> Callable[[Path, Index], None]:
    def apply(folder: Path, index: Index) -> None:
        index["metadata"]["total_size"] += change

    return apply


def no_metadata(folder: Path, index: Index) -> None:
    del index["metadata"]


def another_step(folder: Path, index: Index) -> None:
    """Files of the same names and shapes, saved later."""
    edit_safetensors(
        shard(folder, index, Q), lambda tensors: tensors.update({n: t + 1 for n, t in tensors.items()})
    )


def index_of_another_division(folder: Path, index: Index) -> None:
    index["weight_map"] = {n: f.replace("-of-00006", "-of-00007") for n, f in index["weight_map"].items()}


def prefix_in_index(folder: Path, index: Index) -> None:
    index["weight_map"] = {name.removeprefix("model."): file for name, file in index["weight_map"].items()}


def prefix_in_files(folder: Path, index: Index) -> None:
    for file in folder.glob("model-*.safetensors"):
        bare = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
        save_file(bare, file, metadata={"format": "pt"})


def name_twice(folder: Path, index: Index) -> str:
    return json.dumps(index).replace(f'"{Q}": ', f'"{Q}": "{last(folder).name}", "{Q}": ', 1)


def shard_of_another_division(folder: Path, index: Index) -> None:
    shutil.copy(last(folder), folder / "model-00001-of-00007.safetensors")


#: Case -> what is done, the exit code of `verify`, and the code that tells.
CASES: dict[str, tuple[Callable[[Path, Index], str | None], int, str]] = {
    "the index names a tensor that no model has and no file holds": (ghosts, 3, "FS102 error"),
    "the index names a tensor that its file has lost": (lost, 3, "FS102 error"),
    "the index does not name a tensor of a file": (unnamed, 0, "FS108 warning"),
    "a tensor of a layer is missing from file and index": (gone_from_both, 3, "FS102 error"),
    "a shard is missing, from the index too": (shard_gone_from_both, 3, "FS101 warning"),
    "the index places a tensor in the wrong file": (
        another_file,
        0,
        "FS115 warning",
    ),
    "the index places all tensors of a file in another and never names the file": (
        unnamed_file,
        1,
        "FS115 error",
    ),
    "a shard was copied over another": (copied_shard, 1, "FS303 error"),
    "the file holds a slice of the tensor": (slice_in_file, 1, "FS208 error"),
    "two files hold the tensor, with different values": (twice(lambda t: t + 1), 1, "FS206 error"),
    "two files hold the tensor, one a slice of it": (twice(lambda t: t[:32].clone()), 1, "FS206 error"),
    "`model.safetensors` is next to the index and its shards": (single_beside, 2, "FS106 error"),
    "`model.safetensors` was saved over the shards, the index remains": (single_over, 0, "FS108 warning"),
    "`total_size` is larger than what the files hold": (counts(4096), 0, "FS102 warning"),
    "`total_size` is smaller": (counts(-4096), 0, "FS215 note"),
    "the index has no `metadata`": (no_metadata, 0, "-"),
    "a shard is from another step, with the same names and shapes": (another_step, 0, "-"),
    "the index names shards of another number": (index_of_another_division, 3, "FS101 error"),
    "names in the index lack the prefix `model.`": (prefix_in_index, 0, "FS115 warning"),
    "names in the files lack the prefix `model.`": (prefix_in_files, 0, "FS115 warning"),
    "a name occurs twice in the index": (name_twice, 0, "-"),
    "a shard of another number (`-of-00007`) is in the folder": (
        shard_of_another_division,
        0,
        "FS108 warning",
    ),
}


def loaded(folder: Path, reference: Path) -> str:
    """What transformers makes of a folder, in the words of the page."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except (OSError, KeyError, RuntimeError):
        return "refuses it"
    good = whole(reference)
    differing = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, good[name])]
    if info["missing_keys"]:
        return "initialises the tensor, with a warning"
    return "loads the other values" if differing else "loads the model"


def rows() -> dict[str, tuple[str, str, str]]:
    """Case -> what transformers does, the exit code, the code: as the page has it."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    return {case: (does, *re.split(r", exit ", told)[::-1]) for case, does, told, *_ in cells[2:]}  # type: ignore[misc]


def test_the_page_has_every_case() -> None:
    assert list(rows()) == list(CASES)


@pytest.mark.parametrize("case", CASES)
def test_what_is_made_of_it(case: str, made: Path, tmp_path: Path) -> None:
    apply, code, says = CASES[case]
    folder = tmp_path / "model"
    shutil.copytree(made, folder)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(apply(folder, index) or json.dumps(index))
    ran = cli("verify", folder)
    told = {f"{f['code']} {f['severity']}" for f in ran.findings}
    assert ran.code == code, ran.findings
    assert says in told if says != "-" else told == {"FS109 note"}
    assert rows()[case] == (loaded(folder, made), str(code), says)


@pytest.mark.parametrize("apply", [unnamed, another_file, prefix_in_index, name_twice])
def test_what_is_written_is_what_transformers_loads(
    apply: Callable[[Path, Index], str | None], made: Path, tmp_path: Path
) -> None:
    """A result has the files' own names and tensors, whatever the index said."""
    folder = tmp_path / "model"
    shutil.copytree(made, folder)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(apply(folder, index) or json.dumps(index))
    assert cli("merge", folder, tmp_path / "out").code == 0
    good, out = whole(made), load_file(tmp_path / "out" / SINGLE)
    assert good.keys() == out.keys() and all(torch.equal(good[name], out[name]) for name in good)


def warned(ran: Ran) -> set[str]:
    return {f["code"] for f in ran.findings if f["severity"] == "warning"}


@pytest.mark.parametrize("count", ["files", "tied", "bools", "other dtype"])
def test_writers_that_count_otherwise(count: str, made: Path, tmp_path: Path) -> None:
    """Sizes of files (mlx-lm), a tied output layer once more, an eighth of a byte for a bool, those before a
    cast."""
    folder = tmp_path / "model"
    shutil.copytree(made, folder)
    index = json.loads((folder / INDEX).read_text())
    config = json.loads((folder / "config.json").read_text())
    size = index["metadata"]["total_size"]
    if count == "files":
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    elif count == "tied":
        edit_safetensors(
            shard(folder, index, "lm_head.weight"), lambda tensors: tensors.pop("lm_head.weight")
        )
        del index["weight_map"]["lm_head.weight"]
        config["tie_word_embeddings"] = True
    elif count == "bools":
        edit_safetensors(last(folder), lambda tensors: tensors.update(mask=torch.ones(80, dtype=torch.bool)))
        index["weight_map"]["mask"] = last(folder).name
        size += 10
    else:
        size //= 2
    index["metadata"]["total_size"] = size
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    files = [file for file in folder.glob("*.safetensors") if not load_file(file)]
    for file in files:
        file.unlink()
    ran = cli("verify", folder)
    # A shard that held nothing but the tied tensor is no longer named, and its number is missing.
    assert ran.code == 0 and warned(ran) <= ({"FS101"} if files else set()), ran.findings


def test_a_slice_that_the_count_tells_of(made: Path, tmp_path: Path) -> None:
    """What is gone from file and index both, and repeats in no layer: the bytes are missed."""
    folder = tmp_path / "model"
    shutil.copytree(made, folder)
    index = json.loads((folder / INDEX).read_text())
    edit_safetensors(
        shard(folder, index, "model.norm.weight"), lambda tensors: tensors.pop("model.norm.weight")
    )
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    found = cli("verify", folder).having("FS102")
    assert [f["severity"] for f in found] == ["warning"] and "256 fewer" in found[0]["got"]


def test_a_single_file_is_taken_by_its_name(made: Path, tmp_path: Path) -> None:
    """Where two models lie in a folder, naming the file chooses."""
    folder = tmp_path / "model"
    shutil.copytree(made, folder)
    single_beside(folder, {})
    assert_refused(folder, tmp_path / "out", "FS106", exit=2)
    assert cli("merge", folder / SINGLE, tmp_path / "out").code == 0
