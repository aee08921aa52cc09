"""Conversions from a bucket to a disk and to a bucket against a download, a conversion and an upload.

Reads are compared with those of obstore alone.

    python benches/stores.py [--size 2GiB] [--rounds 3]

The server is SeaweedFS on this host. Two tensor-parallel ranks of Megatron-LM are converted to Hugging Face;
the peer copies them with rclone first. Each side is a process of its own, and its result is compared by hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fastshard

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/stores")]

from evaluation import write_model  # noqa: E402 - below the paths
from servers import ACCESS_KEY, REGION, SECRET_KEY, S3Server, seaweedfs_server  # noqa: E402
from synthetic import parse_size  # noqa: E402 - below the paths

#: Reads a bucket's files in ranges of 8 MiB by four threads, with conditions, and prints seconds.
READ = """
import concurrent.futures, obstore, sys, time
store = obstore.store.from_url("s3://models", client_options={"allow_http": True})
files = [meta for batch in obstore.list(store) for meta in batch if meta["size"] > 1 << 20]
ranges = [(m, at, min(8 << 20, m["size"] - at)) for m in files for at in range(0, m["size"], 8 << 20)]
def read(one):
    meta, at, length = one
    options = {"range": (at, at + length), "if_match": meta["e_tag"]}
    return len(obstore.get(store, meta["path"], options=options).bytes())
begin = time.perf_counter()
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    total = sum(pool.map(read, ranges))
print(time.perf_counter() - begin, total)
"""
#: Reads them as `verify` does, and prints seconds and the peak of its own memory.
VERIFY = """
import fastshard, sys, time
begin = time.perf_counter()
assert fastshard.verify("s3://models/ranks", memory="256MiB").ok
print(time.perf_counter() - begin)
"""
#: Runs a command line of fastshard and prints the peak of its anonymous memory.
CONVERT = """
import sys, threading, time
from fastshard.__main__ import main
peak = 0
def look():
    global peak
    while True:
        rows = [row for row in open("/proc/self/status") if row.startswith("RssAnon")]
        peak = max(peak, int(rows[0].split()[1]))
        time.sleep(0.01)
threading.Thread(target=look, daemon=True).start()
code = main()
print(peak, file=sys.stderr)
sys.exit(code)
"""


def find_environment(server: S3Server) -> dict[str, str]:
    """Return the environment in which clients find the server."""
    return {
        **os.environ,
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ENDPOINT": server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
    }


def find_rclone_remote(server: S3Server, prefix: str = "ranks") -> str:
    """Return the remote of a prefix of the server for rclone, on its command line."""
    return (
        f":s3,provider=SeaweedFS,endpoint='{server.url}',access_key_id={ACCESS_KEY},"
        f"secret_access_key={SECRET_KEY},force_path_style=true:models/{prefix}"
    )


def run(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Run a command; return its seconds, and the last line that it printed."""
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[-1]}: {done.stderr[-2000:]}")
    return time.perf_counter() - begin, (done.stdout + done.stderr).strip().splitlines()[-1]


def convert(source: str, out: Path | str, environment: dict[str, str]) -> tuple[float, int]:
    """Convert a source to Hugging Face; return the seconds and the peak of anonymous memory in KiB."""
    command = [
        sys.executable,
        "-c",
        CONVERT,
        "convert",
        source,
        str(out),
        "--to",
        "hf",
        "--fsync",
        "none",
        "-qq",
    ]
    seconds, last = run([*command, "--memory", "256MiB"], environment)
    return seconds, int(last)


def hash_result(out: Path) -> str:
    """Return the hash of the weights of a result, and remove it."""
    hasher = hashlib.sha256()
    for path in sorted(out.glob("*.safetensors")):
        hasher.update(path.read_bytes())
    shutil.rmtree(out)
    return hasher.hexdigest()


def hash_stored_result(server: S3Server, prefix: str) -> str:
    """Return the hash of the weights of a result in the bucket, and remove it."""
    client, hasher = server.client(), hashlib.sha256()
    listed = client.list_objects_v2(Bucket="models", Prefix=f"{prefix}/")["Contents"]
    for key in sorted(one["Key"] for one in listed):
        if key.endswith(".safetensors"):
            for chunk in client.get_object(Bucket="models", Key=key)["Body"].iter_chunks(1 << 20):
                hasher.update(chunk)
        client.delete_object(Bucket="models", Key=key)
    return hasher.hexdigest()


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, seaweedfs_server() as server:
        place = Path(folder)
        nbytes = write_model(place / "hf", parse_size(arguments.size))
        fastshard.convert(place / "hf", place / "ranks", to="megatron:legacy", tp=2, fsync=False)
        shutil.rmtree(place / "hf")
        # A training leaves none; with one each side would read everything twice.
        (place / "ranks/fastshard.manifest.json").unlink()
        environment, remote = find_environment(server), find_rclone_remote(server)
        server.client().create_bucket(Bucket="models")
        run(["rclone", "copy", str(place / "ranks"), remote], environment)
        shutil.rmtree(place / "ranks")
        figures: dict[str, list[float]] = {
            "wall_ratio": [],
            "read_ratio": [],
            "seconds": [],
            "peer_seconds": [],
            "to_bucket_ratio": [],
            "to_bucket_seconds": [],
        }
        peaks = []
        for _ in range(arguments.rounds):
            seconds, peak = convert("s3://models/ranks", place / "out", environment)
            ours = hash_result(place / "out")
            copied, _ = run(["rclone", "copy", remote, str(place / "copy")], environment)
            peer = copied + convert(str(place / "copy"), place / "out", environment)[0]
            to_bucket, at_most = convert("s3://models/ranks", "s3://models/ours", environment)
            peaks.append(at_most >> 10)
            their_remote = find_rclone_remote(server, "theirs")
            uploaded, _ = run(["rclone", "copy", str(place / "out"), their_remote], environment)
            assert hash_result(place / "out") == ours
            assert hash_stored_result(server, "ours") == hash_stored_result(server, "theirs")
            shutil.rmtree(place / "copy")
            figures["to_bucket_ratio"].append(to_bucket / (peer + uploaded))
            figures["to_bucket_seconds"].append(to_bucket)
            figures["wall_ratio"].append(seconds / peer)
            figures["seconds"].append(seconds)
            figures["peer_seconds"].append(peer)
            peaks.append(peak >> 10)
            _, alone = run([sys.executable, "-c", READ], environment)
            _, verified = run([sys.executable, "-c", VERIFY], environment)
            figures["read_ratio"].append(float(alone.split()[0]) / float(verified))
        median = {name: round(statistics.median(values), 3) for name, values in figures.items()}
        print(json.dumps({"bytes": nbytes, **median, "peak_mib": max(peaks)}))


if __name__ == "__main__":
    main()
