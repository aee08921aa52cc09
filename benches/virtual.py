"""A GPT-NeoX tp 2 checkpoint as a model of transformers: from memory, and by way of a conversion on disk.

    python benches/virtual.py [--size 1GiB] [--rounds 3] [--dir DIR]

All sides must compute the same logits, bit by bit. Printed are medians of wall time, CPU and peak memory, and
what was written.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path

import neox
import torch
from measure import Side, files, machine, remove, run, warm, workplace

WAYS = {
    "load_model, verified": "verified",
    "load_model(verify=False)": "unverified",
    "convert + from_pretrained": "convert",
}


def shape(size: int) -> dict[str, int]:
    """Sizes of a model of about so many bytes in float16."""
    hidden, vocab = (2048, 50432) if size >= 1 << 29 else (256, 2048)
    rest = max(0, size // 2 - 2 * hidden * vocab)
    return {"hidden": hidden, "vocab": vocab, "layers": max(1, rest // (12 * hidden * hidden))}


def main() -> None:
    from fastshard.common.byte_sizes import parse_size

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir and workplace(options.dir)) as folder:
        base = Path(folder)
        neox.write(base / "source", **shape(parse_size(options.size)))
        records: dict[str, list[dict[str, float]]] = {label: [] for label in WAYS}
        for _, (label, how) in itertools.product(range(options.rounds), WAYS.items()):
            remove(base / "into")
            warm(base / "source")
            arguments = {
                "how": how,
                "source": str(base / "source"),
                "into": str(base / "into"),
                "out": str(base / how),
            }
            records[label].append(run(Side(label, "model", arguments)))
        logits = [torch.load(base / how) for how in WAYS.values()]
        assert all(torch.equal(logits[0], other) for other in logits), "the logits differ"
        print(machine(base))
        print(
            f"{sum(f.stat().st_size for f in files(base / 'source')) / 2**30:.2f} GiB of GPT-NeoX, tp 2; "
            "logits equal"
        )
        for label, found in records.items():
            wall, cpu, rss, anonymous = (
                statistics.median(record[key] for record in found)
                for key in ("wall", "cpu", "rss", "anonymous")
            )
            written = "writes it all" if WAYS[label] == "convert" else "writes nothing"
            print(
                f"{label}: {wall:.2f} s, {cpu:.2f} s CPU, {rss / 2**20:.0f} MiB resident, "
                f"{anonymous / 2**20:.0f} MiB anonymous, {written}"
            )


if __name__ == "__main__":
    main()
