"""Stands in for a cluster: `srun`, `mpirun`, `sbatch` and `kubectl` as far as pages use them, with processes
of this host; and for stores: a server of S3 with `aws s3 sync`, and an endpoint with the hub's interface.

What is started is what the real ones would start, with the variables that these set for it. source: the
output environment variables of `man srun` and `man sbatch`, Open MPI's OMPI_COMM_WORLD_*, Kubernetes' Indexed
Jobs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).parents[1]
#: Folders of the tests' servers.
STORES = [str(TESTS), str(TESTS / "stores")]
#: What the hub has.
MODEL = TESTS / "fixtures/sharded/hf_sharded"


def ranks(command: list[str], each: list[dict[str, str]]) -> int:
    """Starts a process for each rank; fails if one does."""
    started = [subprocess.Popen(command, env=os.environ | variables) for variables in each]
    return max(abs(process.wait()) for process in started)


def srun(words: list[str]) -> int:
    count = int(words[words.index("-N") + 1])
    command = words[words.index("1") + 1 :]
    return ranks(
        command,
        [
            {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": str(count),
                "SLURM_STEP_NUM_TASKS": str(count),
            }
            for rank in range(count)
        ],
    )


def mpirun(words: list[str]) -> int:
    count = int(words[1])
    return ranks(
        words[2:],
        [{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(count)} for rank in range(count)],
    )


def sbatch(words: list[str]) -> int:
    given = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
    print("7" if "--parsable" in given else "Submitted batch job 8", flush=True)
    if "--wrap" in given:
        return subprocess.run(["sh", "-c", words[words.index("--wrap") + 1]], check=False).returncode
    first, _, last = given["--array"].partition("-")
    return max(
        subprocess.run(
            ["sh", words[-1]],
            env=os.environ | {"SLURM_ARRAY_TASK_ID": str(task)},
            stdout=subprocess.DEVNULL,
            check=False,
        ).returncode
        for task in range(int(first), int(last) + 1)
    )


def kubectl(words: list[str]) -> int:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(Path(words[-1]).read_text(encoding="utf-8")))
    codes = [0]
    for job in documents:
        print(f"job.batch/{job['metadata']['name']} created", flush=True)
        container = job["spec"]["template"]["spec"]["containers"][0]
        for index in range(job["spec"].get("completions", 1)):
            variables = (
                {"JOB_COMPLETION_INDEX": str(index)} if job["spec"].get("completionMode") == "Indexed" else {}
            )
            done = subprocess.run(
                [*container["command"], *container["args"]],
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                check=False,
            )
            codes.append(done.returncode)
    return max(codes)


def aws(words: list[str]) -> int:
    """`aws s3 sync FOLDER s3://BUCKET/PREFIX`, which makes the bucket too."""
    sys.path[:0] = STORES
    from servers import S3Server, read_folder

    bucket, _, prefix = words[3].removeprefix("s3://").partition("/")
    files = {f"{prefix}/{path}": content for path, content in read_folder(Path(words[2])).items()}
    S3Server(os.environ["AWS_ENDPOINT_URL"], {}).make_bucket(bucket, files)
    return 0


def serve(_words: list[str]) -> int:
    """Serves S3 and the hub until the input ends; prints the variables by which they are reached.

    The hub has `my-org/my-model`: its branch `main` and its tag `v1.0` are one commit. Results are published
    in `my-org/published`, which is new.
    """
    sys.path[:0] = STORES
    from hub_server import serving_hub
    from servers import moto_server, read_folder

    with moto_server() as s3, serving_hub() as hub:
        hub.repo("my-org/my-model").commit(read_folder(MODEL), "main", "v1.0")
        hub.repo("my-org/published").commit({".gitattributes": b""})
        hub.tokens["hf_stand_in"] = {"my-org/my-model", "my-org/published"}
        variables = {
            **s3.environment,
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": "hf_stand_in",
            # Its protocol is that of another service, which nothing stands in for.
            "HF_HUB_DISABLE_XET": "1",
        }
        print(json.dumps(variables), flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))
