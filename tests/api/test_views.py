"""Views of mapped files: of the file that was opened, whatever has its name by now."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import fastshard
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

ROWS = 4096


def write(path: Path, value: float, names: tuple[str, ...] = ("a", "b")) -> None:
    save_file({name: np.full((ROWS, 8), value + i, np.float32) for i, name in enumerate(names)}, path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt/model.safetensors"
    path.parent.mkdir()
    write(path, 1)
    return path


READS = {
    "numpy": lambda t: t.numpy(),
    "torch": lambda t: t.torch().numpy(),
    "slice": lambda t: t[0:10],
    "rows": lambda t: t[5],
    "array": lambda t: np.asarray(t),
}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("read", READS)
def test_another_save_under_the_name_is_not_read(read: str, file: Path) -> None:
    tensor = fastshard.open(file.parent)["a"]
    write(file.parent / "next", 7, ("other", "names", "here"))
    (file.parent / "next").replace(file)
    assert np.unique(READS[read](tensor)).tolist() == [1]
    file.unlink()
    assert np.unique(READS[read](tensor)).tolist() == [1]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", ["cut", "grown", "rewritten"])
def test_a_file_that_changed_is_refused(change: str, read: str, file: Path) -> None:
    tensor = fastshard.open(file.parent)["a"]
    content = file.read_bytes()
    with file.open("r+b") as handle:
        if change == "cut":
            handle.truncate(len(content) // 2)
        else:
            handle.write(content + b"more" if change == "grown" else content)
    os.utime(file, ns=(1, 1))
    with pytest.raises(fastshard.ProblemError) as caught:
        READS[read](tensor)
    assert caught.value.code == "FS506" and caught.value.path == str(file)


def test_gathered_bytes_of_a_file_that_changed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "layout.json").write_text('{"tp": 2, "tp_dim": {"a": 1, "b": 1}}')
    for rank in range(2):
        write(tmp_path / f"tp_rank_{rank:02d}.safetensors", rank)
    tensor = fastshard.open(tmp_path)["a"]
    assert tensor.numpy().shape == (ROWS, 16)
    file = tmp_path / "tp_rank_01.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    os.utime(file, ns=(1, 1))
    with pytest.raises(fastshard.ProblemError, match=r"tp_rank_01.*FS506"):
        tensor.numpy()


def test_views_outlive_the_checkpoint(file: Path) -> None:
    ckpt = fastshard.open(file.parent)
    arrays = [ckpt["a"].numpy(), ckpt["b"][1:9], ckpt["a"].torch()]
    file.unlink()
    del ckpt
    gc.collect()
    assert [np.unique(np.asarray(a)).tolist() for a in arrays] == [[1], [2], [1]]


@pytest.mark.parametrize("read", ["numpy", "torch"])
def test_a_hundred_thousand_views_take_one_descriptor(read: str, tmp_path: Path) -> None:
    """And one map: a process may have no more than 65,530."""
    names = tuple(f"w{i}" for i in range(2000))
    save_file({n: np.full(4, i, np.int32) for i, n in enumerate(names)}, tmp_path / "model.safetensors")
    ckpt = fastshard.open(tmp_path)
    ckpt["w0"].numpy()
    before = descriptors()
    views = [READS[read](ckpt[name]) for name in names for _ in range(50 if read == "numpy" else 1)]
    assert len(views) == (100_000 if read == "numpy" else 2000)
    assert descriptors() - before <= 1
    assert all(view[3] == i // (len(views) // 2000) for i, view in enumerate(views))
    del views
    gc.collect()
    assert descriptors() <= before


def test_one_tensor_taken_often_takes_few_descriptors(file: Path) -> None:
    tensor = fastshard.open(file.parent)["a"]
    before = descriptors()
    taken = [tensor.torch() for _ in range(100)]
    assert descriptors() - before <= 8
    for i, one in enumerate(taken):
        one.fill_(i)
    assert [float(one.mean()) for one in taken] == list(range(100))
    assert np.unique(tensor.numpy()).tolist() == [1]


def test_what_is_written_to_a_view_goes_with_it(file: Path) -> None:
    """Pages of the file that the process has of its own, while another view of it lives on: 64 MiB come and
    go."""
    save_file({"big": np.zeros(16 << 20, np.float32), "small": np.zeros(4, np.float32)}, file)
    ckpt = fastshard.open(file.parent)
    small = ckpt["small"].torch()

    def written() -> int:
        # Of the whole process other things come and go too.
        own, total = False, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(maxsplit=1)[0]:
                own = line.endswith(str(file.resolve()))
            elif own and line.startswith("Anonymous:"):
                total += int(line.split()[1]) << 10
        return total

    big = ckpt["big"].torch()
    before = written()
    assert before < 1 << 16
    big.fill_(1)
    assert written() - before >= 64 << 20
    half = big[: 8 << 20]
    del big
    gc.collect()
    assert written() - before >= 64 << 20 and bool((half == 1).all())
    del half
    gc.collect()
    assert written() - before < 1 << 20
    assert not ckpt["big"].torch().any() and not small.any()


def test_neighbours_on_one_page_do_not_disturb_each_other(tmp_path: Path) -> None:
    save_file({n: np.zeros(8, np.float32) for n in "abc"}, tmp_path / "model.safetensors")
    ckpt = fastshard.open(tmp_path)
    a, b, c = (ckpt[n].torch() for n in "abc")
    b.fill_(5)
    again = ckpt["b"].torch()
    again.fill_(7)
    assert not a.any() and not c.any() and bool((b == 5).all())
    del b, again
    gc.collect()
    assert not a.any() and not c.any() and not ckpt["b"].torch().any() and not ckpt["b"].numpy().any()


@pytest.mark.parametrize("read", READS)
def test_a_file_that_is_not_to_be_mapped_is_read(
    read: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on network filesystems, where the core gives no descriptor."""
    tensor = fastshard.open(file.parent)["a"]
    monkeypatch.setattr(tensor._plan.maps, "_descriptor", lambda file: None)
    have = READS[read](tensor)
    assert np.unique(have).tolist() == [1]
    have[...] = 0
    assert np.unique(READS[read](tensor)).tolist() == [1]


def test_without_descriptors_left_it_is_read(file: Path) -> None:
    script = f"""
import fastshard, numpy, resource
ckpt = fastshard.open({str(file.parent)!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(ckpt["a"].numpy().max(), ckpt["a"].numpy().flags.writeable)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1.0 True\n"), done.stderr


def test_views_from_many_threads(file: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    ckpt = fastshard.open(file.parent)

    def take(i: int) -> bool:
        tensor = ckpt["ab"[i % 2]].torch()
        good = bool((tensor == 1 + i % 2).all())
        tensor.fill_(-1)
        return good and bool((torch.from_numpy(ckpt["ab"[i % 2]].numpy().copy()) == 1 + i % 2).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(take, range(400)))
