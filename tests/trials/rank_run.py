"""One process of a run of several, called as users call it: ``rank_run.py REQUEST``, where the request is
JSON.

``do`` is ``convert`` (a rank), ``begin``, ``part`` or ``commit``, ``with`` its arguments; ``locks`` false
lets files be locked by nobody, as on filesystems that know no locks, or where each host keeps its own;
``clock`` is the file by which ranks wait. What came of it is printed as one line of JSON.
"""

import errno
import json
import os
import sys

import fastshard
import intercept
from fastshard.conversion.distributed import split_runs

CALLS = {
    "convert": fastshard.convert,
    "begin": split_runs.split,
    "part": split_runs.make_part,
    "commit": split_runs.commit,
}


def main() -> int:
    """Exit code 0, or that of the error."""
    request = json.loads(sys.argv[1])
    if not request["locks"]:
        intercept.refuse("flock", errno.ENOSYS)
    if request.get("clock"):
        os.environ["FASTSHARD_CLOCK"] = request["clock"]
    try:
        result = CALLS[request["do"]](**request["with"])
    except fastshard.FastshardError as error:
        told = {"codes": [f.code for f in error.findings], "words": str(error)}
        print(json.dumps(told))
        return int(error.exit_code)
    told = {"codes": [f.code for f in getattr(result, "findings", [])]}
    told |= {"run": result.id} if request["do"] == "begin" else {}
    told |= {"made": result} if request["do"] == "part" else {}
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
