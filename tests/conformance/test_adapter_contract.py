"""What each adapter and each target owes: one adapter takes a checkpoint, damage is named, and a result opens
again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fastshard
import pytest
from cells import made
from fastshard.common.listing import list_roots
from fastshard.sources import registry
from fastshard.sources.base import Options
from fastshard.targets.base import Target
from fastshard.targets.registry import TARGETS
from fastshard.testing import DAMAGES, list_adapters, restore_content
from helpers import cli
from origins import ORIGINS
from test_damage import kind_of, spare

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

#: Adapters that find or refuse a checkpoint of another's too, and are asked after it.
LATER = {
    "hf_rank_shards": ["hf"],
    "universal": ["deepspeed"],
    "fsdp_ranks": ["any_ranks"],
    "torch_checkpointing": ["any_ranks"],
    "colossalai": ["hf"],
}
#: What no origin is for: an adapter has no model of its own, and rank files of any name are in tests/fsdp.
WITHOUT_ORIGIN = {"peft", "any_ranks"}
#: One file is all of it: without that nothing is there.
ONE_FILE = {"easylm"}
#: What has no checksum and is not compressed: zeros in its place are values, all of them, and a warning.
ONLY_WARNED = {("levanter", "zeros")}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each origin, made once; a test that changes one changes it back."""
    folder = tmp_path_factory.mktemp("contract")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            ORIGINS[name].make(folder / name)
        return folder / name

    return make


def find_needed_file(name: str, root: Path) -> Path:
    """The largest file that a merge cannot do without."""
    files = [path for path in root.rglob("*") if path.is_file() and not spare(name, kind_of(path))]
    return max(files, key=lambda path: (path.stat().st_size, path))


@pytest.mark.parametrize("name", ORIGINS)
def test_one_adapter_takes_a_checkpoint_and_no_other_before_it(
    name: str, checkpoints: Callable[[str], Path]
) -> None:
    root = checkpoints(name)
    first, *others = list_adapters(root)
    assert registry.detect(list_roots([root]), Options()).adapter.name == first
    assert others == LATER.get(name, [])


def test_every_adapter_has_an_origin(checkpoints: Callable[[str], Path]) -> None:
    taken = {list_adapters(checkpoints(name))[0] for name in ORIGINS}
    assert taken == {adapter.name for adapter in registry.load_adapters()} - WITHOUT_ORIGIN


@pytest.mark.parametrize("name", ORIGINS)
def test_a_file_that_is_missing_is_named(name: str, checkpoints: Callable[[str], Path]) -> None:
    root = checkpoints(name)
    path = find_needed_file(name, root)
    with restore_content(path):
        path.unlink()
        ran = cli("verify", root)
    if name in ONE_FILE:
        assert ran.code == 2 and [error["code"] for error in ran.errors] == ["FS513"], ran.out
        return
    assert ran.code == 3
    # Chunks of an array are named by the array.
    assert any(path.name in json.dumps(error) or error.get("tensor") for error in ran.errors), ran.out


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ORIGINS)
def test_a_damaged_file_is_named(name: str, damage: str, checkpoints: Callable[[str], Path]) -> None:
    root = checkpoints(name)
    path = find_needed_file(name, root)
    with restore_content(path) as content:
        path.write_bytes(DAMAGES[damage](content))
        ran = cli("verify", root)
    if (name, damage) in ONLY_WARNED:
        (warning,) = ran.having("FS313", severity="warning")
        assert ran.code == 0 and warning["tensor"], ran.out
        return
    assert ran.code in (1, 3) and not ran.having("FS520")
    assert any(path.name in json.dumps(error) or error.get("tensor") for error in ran.errors), ran.out


@pytest.mark.parametrize("to", TARGETS)
def test_a_target_has_a_docstring_and_refuses_an_option_that_nobody_knows(
    to: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    target = TARGETS[to]
    assert issubclass(target, Target) and to in target.names
    assert target.__doc__ and target.__doc__ != Target.__doc__
    with pytest.raises(TypeError, match="unknown option 'no_such_option'"):
        fastshard.convert(checkpoints("hf_safetensors"), tmp_path / "out", to=to, no_such_option=1)  # type: ignore[call-arg]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", TARGETS)
def test_a_result_opens_again(to: str, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    # One target holds an optimizer always.
    name = "zero1" if to == "universal" else "hf_safetensors"
    out = tmp_path / "out"
    ran = made(checkpoints(name), out, to, ORIGINS[name])
    assert ran.code == 0, ran.out
    with fastshard.open(out) as opened:
        assert len(opened) and all(
            list(tensor.torch().shape) == list(tensor.shape) for tensor in opened.values()
        )
