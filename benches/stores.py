"""Conversions from a bucket to a disk and to a bucket against a download, a conversion and an upload (P19).

    python benches/all_bars.py --only P19

The server is SeaweedFS on this host. Two tensor-parallel ranks of Megatron-LM are converted to Hugging Face;
the peer copies them with rclone first, and its result after. Results are compared by hash. Reads are compared
with those of obstore alone, and a checkpoint of 175 billion parameters is looked at behind 50 ms of latency.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fastshard
import sparse_gpt3
from bucket_of_holes import serve_folder
from measure import Place, Result, Side, Target, compare, digests, find_lack, find_load, remove, run

_TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(_TESTS), str(_TESTS / "stores"), str(_TESTS / "trials")]

from servers import ACCESS_KEY, REGION, SECRET_KEY, S3Server, seaweedfs_server  # noqa: E402 - below the paths
from sources import FIXTURES, llama  # noqa: E402 - below the paths

_BUCKET = "models"
#: Seconds until each answer of the server of holes.
_LATENCY = 0.05


@contextmanager
def _environment_of(url: str) -> Iterator[None]:
    """Let clients of this process and of its children find a server within a block."""
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ENDPOINT": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _name_remote(url: str, prefix: str) -> str:
    """Return the remote of a prefix of the server for rclone, on its command line."""
    return (
        f":s3,provider=SeaweedFS,endpoint='{url}',access_key_id={ACCESS_KEY},"
        f"secret_access_key={SECRET_KEY},force_path_style=true:{_BUCKET}/{prefix}"
    )


def _write_ranks(place: Place, folder: Path) -> int:
    """Write two tensor-parallel ranks of Megatron-LM of about the place's size; return their bytes."""
    sizes = (
        {"hidden": 4096, "ffn": 11008, "vocab": 32000}
        if place.full
        else {"hidden": 256, "ffn": 512, "vocab": 999}
    )
    a_layer = 2 * (4 * sizes["hidden"] ** 2 + 3 * sizes["hidden"] * sizes["ffn"])
    layers = max(1, (place.size - 4 * sizes["vocab"] * sizes["hidden"]) // a_layer)
    source = llama(place.memory / "llama", FIXTURES, 0, layers=layers, **sizes)
    fastshard.convert(source, folder, to="megatron:legacy", tp=2, fsync=False)
    shutil.rmtree(source)
    # A training leaves none; with one each side would read everything twice.
    (folder / "fastshard.manifest.json").unlink()
    return sum(path.stat().st_size for path in folder.rglob("*.pt"))


def _convert(source: str, out: str) -> list[str]:
    options = ["--to", "hf", "--fsync", "none", "--memory", "256MiB", "-qq"]
    return [sys.executable, "-m", "fastshard", "convert", source, out, *options]


def _hash_stored_result(server: S3Server, prefix: str) -> dict[str, str]:
    """Return the hash of each file of weights of a result in the bucket."""
    client, found = server.client(), {}
    for one in client.list_objects_v2(Bucket=_BUCKET, Prefix=f"{prefix}/")["Contents"]:
        if one["Key"].endswith(".safetensors"):
            hasher = hashlib.sha256()
            for chunk in client.get_object(Bucket=_BUCKET, Key=one["Key"])["Body"].iter_chunks(1 << 20):
                hasher.update(chunk)
            found[one["Key"].removeprefix(f"{prefix}/")] = hasher.hexdigest()
    return found


def measure_p19(place: Place) -> Iterator[Result]:
    """Both sides from one bucket, and to it; their results must be the same."""
    lack = find_lack("obstore") or find_lack(program="weed") or find_lack(program="rclone")
    if lack:
        yield Result("bucket to bucket", "fastshard", "rclone and fastshard", (), 0, reason=lack)
        return
    ranks = place.memory / "ranks"
    nbytes = _write_ranks(place, ranks)
    with seaweedfs_server() as server, _environment_of(server.url):
        server.client().create_bucket(Bucket=_BUCKET)
        yield from _compare_conversions(place, server, ranks, nbytes)
        yield _compare_reads(place, ranks, nbytes)
    remove(ranks)
    yield _measure_inspect(place)


def _compare_conversions(place: Place, server: S3Server, ranks: Path, nbytes: int) -> Iterator[Result]:
    stored, out, copy = f"s3://{_BUCKET}/ranks", place.memory / "out", str(place.memory / "copy")
    theirs, ours = _name_remote(server.url, "theirs"), _name_remote(server.url, "ours")
    download = ["rclone", "copy", _name_remote(server.url, "ranks"), copy]
    upload = ["rclone", "copy", str(out), theirs]
    run(
        Side(
            "upload",
            "command",
            {"command": ["rclone", "copy", str(ranks), _name_remote(server.url, "ranks")]},
        )
    )
    least = {"least_bytes": 2 << 30}
    targets = (Target("wall_ratio", 0.7, **least), Target("peak_mib", 256, **least))

    def make_side(label: str, commands: list[list[str]], before: list[list[str]], folders: list[str]) -> Side:
        return Side(label, "commands", {"commands": commands, "before": before, "remove": folders})

    found: list[dict[str, str]] = []

    def check(side: Side, to: Path | None) -> None:
        result = (
            digests(out)
            if to
            else _hash_stored_result(server, "ours" if side.label == "fastshard" else "theirs")
        )
        found.append(result)
        assert result and found[-1] == found[0], f"{side.label}: other tensors"

    peer = "rclone and fastshard"
    result = Result("bucket to disk", "fastshard", peer, targets, nbytes)
    yield compare(
        result,
        [
            make_side(peer, [download, _convert(copy, str(out))], [], [copy]),
            make_side("fastshard", [_convert(stored, str(out))], [], []),
        ],
        place.rounds,
        source=ranks,
        out=out,
        check=check,
    )
    remove(Path(copy))
    found.clear()
    purge = ["rclone", "purge"]
    result = Result("bucket to bucket", "fastshard", peer, targets, nbytes)
    yield compare(
        result,
        [
            make_side(
                peer,
                [download, _convert(copy, str(out)), upload],
                [[*purge, theirs]],
                [copy, str(out)],
            ),
            make_side("fastshard", [_convert(stored, f"s3://{_BUCKET}/ours")], [[*purge, ours]], []),
        ],
        place.rounds,
        source=ranks,
        out=None,
        check=check,
    )
    remove(Path(copy))
    remove(out)


def _compare_reads(place: Place, ranks: Path, nbytes: int) -> Result:
    target = Target("wall_ratio", 1 / 0.8, least_bytes=2 << 30)
    result = Result("verify in a bucket", "fastshard", "obstore", (target,), nbytes)
    command = ["verify", f"s3://{_BUCKET}/ranks", "--memory", "256MiB", "-qq"]
    sides = [
        Side("obstore", "obstore_reads", {"address": f"s3://{_BUCKET}/ranks"}),
        Side("fastshard", "cli", {"command": command}),
    ]
    return compare(result, sides, place.rounds, source=ranks, out=None)


def _measure_inspect(place: Place) -> Result:
    """One look at a checkpoint of holes behind a latency, its start not included."""
    folder = place.disk / "holes"
    layers = 96 if place.full else 2
    size, _ = sparse_gpt3.neox(folder, layers)
    case = f"inspect of GPT-3, {layers} layers, GPT-NeoX, in a bucket behind {1e3 * _LATENCY:.0f} ms"
    target = (Target("seconds", 5),) if place.full else ()
    result = Result(case, "inspect", "", target, 0, state=f"{size:,} bytes, headers of sparse files")
    with ExitStack() as stack:
        url, served = stack.enter_context(serve_folder(folder, _BUCKET, _LATENCY))
        stack.enter_context(_environment_of(url))
        command = ["inspect", f"s3://{_BUCKET}", "--accept", "holes"]
        records: list[dict[str, Any]] = []
        for _ in range(place.rounds):
            served.clear()
            load = find_load()
            records.append(run(Side("inspect", "cli", {"command": command})) | {"load": load})
        result.records["inspect"] = records
        result.more |= {"requests": len(served), "mib_read": sum(served) / (1 << 20)}
    print(f"  {case}: {records[-1]['wall']:.3f} s, {len(served)} requests", file=sys.stderr)
    remove(folder)
    return result
