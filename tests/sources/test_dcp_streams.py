"""Records that torch's Zstandard extension compressed, against what torch itself reads of them."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fastshard import _core
from helpers import assert_refused, cli, flip_bit, read_result
from torch.distributed.checkpoint import _extension
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

#: Either library is enough for torch; which one wrote a stream shows in its frames.
LIBRARIES = [name for name in ("zstandard", "pyzstd") if getattr(_extension, name) is not None]
if not LIBRARIES:
    pytest.skip("torch compresses with zstandard or pyzstd", allow_module_level=True)


def state() -> dict[str, Any]:
    """Values that compress, values that do not, and all that has no plain shape."""
    torch.manual_seed(7)
    return {
        "model": {
            "noise": torch.randn(300, 257),
            "ramp": torch.arange(200_000, dtype=torch.int64).reshape(400, 500),
            "zeros": torch.zeros(1 << 20, dtype=torch.bfloat16),
            "f8": torch.randn(64, 32).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "flags": torch.tensor([True, False, True]),
            "view": torch.randn(40, 60).t(),
        },
        "step": 12,
        "note": "text",
    }


def save(
    folder: Path, tensors: dict[str, Any], monkeypatch: pytest.MonkeyPatch, library: str = LIBRARIES[0]
) -> Path:
    with monkeypatch.context() as patch:
        for other in {"zstandard", "pyzstd"} - {library}:
            patch.setattr(_extension, other, None)
        writer = dcp.FileSystemWriter(folder, _extensions=[_extension.ZStandard()])
        dcp.save(tensors, storage_writer=writer, no_dist=True)
    return folder


def flattened(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"model.{name}": tensor for name, tensor in tensors["model"].items()}


def same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    raw = lambda t: t.contiguous().reshape(-1).view(torch.uint8)  # noqa: E731
    return set(have) == set(want) and all(
        have[n].shape == t.shape and have[n].dtype == t.dtype and torch.equal(raw(have[n]), raw(t))
        for n, t in want.items()
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_compressed_records_are_read(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = flattened(state())
    root = save(tmp_path / "ckpt", state(), monkeypatch, library)
    stored = sum(f.stat().st_size for f in root.glob("*.distcp"))
    assert stored < sum(t.nbytes for t in want.values()) / 2, "nothing was compressed"
    assert cli("verify", root).code == 0
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert same(read_result(tmp_path / "out"), want)
    manifest = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    assert set(manifest["values"]["objects"]) == {"step", "note"}
    dcp_to_torch_save(root, tmp_path / "whole.pt")
    assert same(read_result(tmp_path / "out"), flattened(torch.load(tmp_path / "whole.pt")))


def test_a_large_record_takes_no_more_memory_than_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"model": {"large": torch.arange(12 << 20, dtype=torch.int64).reshape(4096, -1)}}
    root = save(tmp_path / "ckpt", tensors, monkeypatch)
    assert tensors["model"]["large"].nbytes == 96 << 20
    script = (
        "import sys; from pathlib import Path; from fastshard.cli import main\n"
        # The peak that the kernel keeps, without the pages of files.
        "Path('/proc/self/clear_refs').write_text('5'); code = main(sys.argv[1:])\n"
        "told = dict(line.split(':') for line in Path('/proc/self/status').read_text().splitlines())\n"
        "peak, files = (int(told[name].split()[0]) << 10 for name in ('VmHWM', 'RssFile'))\n"
        "print(peak - files, file=sys.stderr); sys.exit(code)"
    )
    command = ["merge", root, tmp_path / "out", "--memory", "90MiB", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert int(done.stderr.split()[-1]) <= 90 << 20
    assert same(read_result(tmp_path / "out"), flattened(tensors))


def records(root: Path) -> dict[str, Any]:
    metadata = pickle.loads((root / ".metadata").read_bytes())
    return {index.fqn: info for index, info in metadata.storage_data.items()}


def test_a_flipped_bit_anywhere_in_a_stream_is_found_or_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"model": {"w": torch.arange(5000.0).reshape(50, 100)}}
    root = save(tmp_path / "ckpt", tensors, monkeypatch)
    info = records(root)["model.w"]
    file = root / info.relative_path
    good = file.read_bytes()
    dice = random.Random(3)
    found = 0
    first = range(info.offset, info.offset + 12)
    for number, at in enumerate(
        [*first, *(dice.randrange(info.offset, info.offset + info.length) for _ in range(40))]
    ):
        file.write_bytes(good)
        flip_bit(file, at, dice.randrange(8))
        ran = cli("merge", root, tmp_path / f"out{number}")
        if ran.code == 0:
            # Nothing that torch would read differs: padding, or a date in a header of the zip.
            assert same(read_result(tmp_path / f"out{number}"), flattened(tensors)), at
            continue
        found += 1
        assert ran.code == 1 and not (tmp_path / f"out{number}").exists(), ran.out
        (error,) = ran.errors
        assert error["code"] in {"FS301", "FS302", "FS602", "FS604", "FS312"}, error
        assert error["file"].endswith(info.relative_path)
    assert found > 30


def test_a_stream_cut_short_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"model": {"w": torch.randn(100, 100), "v": torch.randn(50)}}
    root = save(tmp_path / "ckpt", tensors, monkeypatch)
    last = max(records(root).values(), key=lambda info: info.offset)
    file = root / last.relative_path
    file.write_bytes(file.read_bytes()[:-9])
    assert_refused(root, tmp_path / "out", "FS312", file=last.relative_path)
    # The same with metadata that agree: the stream itself has no end.
    metadata = pickle.loads((root / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        if info.offset == last.offset:
            info.length -= 9
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(root, tmp_path / "out", "FS301", file=last.relative_path, message="end too early")


@pytest.mark.parametrize(
    "told", [["stream.aes@example/1"], ["stream.zstd/2"], ["stream.zstd/1", "stream.aes/1"]]
)
def test_another_extension_is_refused_by_its_name(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = save(tmp_path / "ckpt", {"model": {"w": torch.ones(4)}}, monkeypatch)
    metadata = pickle.loads((root / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.transform_descriptors = told
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(root, tmp_path / "out", "FS514", exit=2, got=", ".join(told))


def test_the_state_of_an_optimizer_is_read_of_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are read as numbers, hyperparameters from records that are no tensors."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    held = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    plain = tmp_path / "plain"
    dcp.save(held, checkpoint_id=plain, no_dist=True)
    root = save(tmp_path / "ckpt", held, monkeypatch)
    for folder in (plain, root):
        ran = cli("merge", folder, tmp_path / f"{folder.name}-out")
        assert ran.code == 0, ran.out
    assert same(read_result(tmp_path / "ckpt-out"), read_result(tmp_path / "plain-out"))


@pytest.mark.skipif("zstandard" not in LIBRARIES, reason="compresses by itself")
def test_headers_may_lie_anywhere_in_a_stream(tmp_path: Path) -> None:
    """An object with tensors has headers between data that are not kept while it is looked at."""
    torch.save({"a": torch.randn(3 << 20), "b": torch.randn(2 << 20), "c": [1, "two"]}, tmp_path / "plain")
    stream = _extension.zstandard.ZstdCompressor().compress((tmp_path / "plain").read_bytes())
    (tmp_path / "file").write_bytes(b"before" + stream + b"after")
    told = _core.dcp_object(tmp_path / "file", 6, len(stream))
    assert told["c"] == [1, "two"]
    assert told == _core.dcp_object(tmp_path / "plain", 0, (tmp_path / "plain").stat().st_size)
