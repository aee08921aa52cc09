"""The program, with a folder as a bucket. Run as ``bucket_run.py TMPDIR ARGUMENTS...``."""

import sys
import tempfile
from pathlib import Path

from fastshard.__main__ import main

sys.path.append(str(Path(__file__).parents[1] / "stores"))

from bucket_store import serve_buckets

if __name__ == "__main__":
    serve_buckets()
    tempfile.tempdir = sys.argv.pop(1)
    sys.exit(main())
