"""Results that are published in stores, by the command line: as on a disk, and whatever a network spoils."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import zero_maker
from fastshard.stores import claims, placeholders, registry, result_prefix
from fault_proxy import (
    Fault,
    FaultProxy,
    Request,
    is_begin,
    is_completion,
    is_list,
    is_part,
    is_put_of,
    is_removal,
)
from gcs_server import GcsServer
from helpers import FIXTURES, Ran, at_once, cli
from holding import HANG
from safetensors.numpy import save_file
from servers import ACCESS_KEY, SECRET_KEY, S3Server, read_folder
from tiny_models import model

pytest.importorskip("obstore")

from fastshard.stores.object_writer import WritableObjectStore
from fastshard.stores.objects import ObjectStore

BUCKET = "results"
BEARER = "SECRET-MARKER-OF-A-BEARER-0123456789"
MANIFEST = "fastshard.manifest.json"
INDEX = "model.safetensors.index.json"
CLAIM = claims.CLAIM
#: Seconds after which requests that never succeed are given up.
SOON = 2.0
MEGATRON, HF = "sharded/megatron_legacy_tp2_pp2", "sharded/hf_sharded"
#: Command, source and options of results of each kind.
JOBS = {
    "hf": ("convert", MEGATRON, "--to", "hf"),
    "hf of several files": ("convert", MEGATRON, "--to", "hf", "--max-shard-size", "100KB"),
    "megatron": ("convert", HF, "--to", "megatron:legacy", "--tp", "2"),
    "megatron torch_dist": ("convert", HF, "--to", "megatron:torch_dist"),
    "gpt_neox": ("convert", "gpt_neox/neox_pp_tp2", "--to", "gpt_neox", "--tp", "2"),
    "dcp": ("convert", MEGATRON, "--to", "dcp"),
    "orbax": ("convert", HF, "--to", "orbax", "--zarr2"),
    "maxtext": ("convert", HF, "--to", "maxtext", "--zarr2"),
    "merged": ("merge", "sharded/tp4_micro"),
    "merged with the optimizer": ("merge", "deepspeed/zero3_bf16_dp2", "--optimizer"),
}
_numbers = itertools.count()
pytestmark = pytest.mark.usefixtures("no_settings")


@contextmanager
def logger_restored() -> Iterator[None]:
    """Leaves the logger as it was: `-vv` sets it for the whole process."""
    logger = logging.getLogger("fastshard")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.handlers[:], logger.propagate = handlers, propagate


def forget_what_was_read() -> None:
    """Releases what earlier commands of this process have kept."""
    for root in placeholders._roots.values():
        root.folder.forget()
    placeholders._roots.clear()


def run(*argv: object) -> Ran:
    """Runs a command, as a process of its own would, and looks for secrets in what it says."""
    forget_what_was_read()
    ran = cli(*argv)
    for secret in (SECRET_KEY, BEARER):
        assert secret not in ran.out + ran.err
    return ran


@dataclass(frozen=True)
class Served:
    """A prefix of a server, to which commands are led by their environment."""

    address: str
    #: Returns what the server has below a prefix, by other means than those that are tested.
    read: Callable[[str], dict[str, bytes]]

    def at(self, name: str) -> str:
        return f"{self.address}/{name}"


def serve(server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Leads commands to a server of S3, perhaps through a proxy."""
    for name, value in (server.environment | {"AWS_ENDPOINT_URL": url}).items():
        monkeypatch.setenv(name, value)
    client = server.client()
    root = f"some/run-{next(_numbers)}"

    def read(name: str) -> dict[str, bytes]:
        prefix = f"{root}/{name}/"
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        bodies = {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}
        return {key.removeprefix(prefix): body for key, body in bodies.items()}

    return Served(f"s3://{BUCKET}/{root}", read)


def open_with(monkeypatch: pytest.MonkeyPatch, scheme: str, options: dict[str, str], deadline: float) -> None:
    """Opens stores with options of their own."""
    monkeypatch.setitem(
        registry.OPENERS, scheme, lambda address, _: ObjectStore(address, options, deadline=deadline)
    )
    monkeypatch.setitem(
        registry.WRITERS,
        scheme,
        lambda address, _: WritableObjectStore(address, options, deadline=deadline, upload_deadline=deadline),
    )


@pytest.fixture
def on_moto(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Served:
    return serve(moto, moto.url, monkeypatch)


def read_google(server: GcsServer, prefix: str) -> dict[str, bytes]:
    objects = server.buckets[BUCKET]
    return {key.removeprefix(prefix): c for key, (c, _) in objects.items() if key.startswith(prefix)}


@pytest.fixture
def on_gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with GcsServer(BEARER) as server:
        server.buckets[BUCKET] = {}
        open_with(monkeypatch, "gs", server.options, HANG)

        yield Served(f"gs://{BUCKET}/run", lambda name: read_google(server, f"run/{name}/"))


@pytest.fixture
def on_seaweedfs(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> Served:
    return serve(seaweedfs, seaweedfs.url, monkeypatch)


def equal(published: dict[str, bytes], disk: Path) -> None:
    """Asserts that a result is that of the same run on a disk, and that nothing else is there."""
    expected = read_folder(disk)
    manifests = [json.loads(files.pop(MANIFEST)) for files in (published, expected)]
    assert sorted(published) == sorted(expected)
    assert [name for name in published if published[name] != expected[name]] == []
    assert manifests[0]["tensors"] == manifests[1]["tensors"]


def publishes(served: Served, tmp_path: Path, name: str) -> None:
    """Publishes a result from a disk, from a store and to a disk, each as on a disk."""
    command, source, *options = JOBS[name]
    assert run(command, FIXTURES / source, tmp_path / "disk", *options).code == 0
    ran = run(command, FIXTURES / source, served.at("first"), *options)
    assert ran.code == 0 and not ran.errors, ran.out
    assert ran.doc["written"]
    equal(served.read("first"), tmp_path / "disk")
    assert run("verify", served.at("first")).code == 0
    assert run("diff", served.at("first"), tmp_path / "disk").code == 0
    again = run(command, FIXTURES / source, served.at("first"), *options)
    assert again.code == 2 and again.having("FS504", message="not empty"), again.out
    # What a store has: to another prefix, and to a disk.
    assert run("merge", served.at("first"), tmp_path / "merged").code == 0
    assert run("merge", served.at("first"), served.at("second")).code == 0
    equal(served.read("second"), tmp_path / "merged")
    assert run("merge", tmp_path / "disk", tmp_path / "merged of a disk").code == 0
    equal(read_folder(tmp_path / "merged"), tmp_path / "merged of a disk")


@pytest.mark.parametrize("name", at_once(JOBS, ("hf of several files", "dcp", "merged with the optimizer")))
def test_a_result_on_moto_is_that_of_a_disk(on_moto: Served, tmp_path: Path, name: str) -> None:
    publishes(on_moto, tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_result_on_seaweedfs_is_that_of_a_disk(on_seaweedfs: Served, tmp_path: Path, name: str) -> None:
    publishes(on_seaweedfs, tmp_path, name)


@pytest.mark.parametrize("name", at_once(JOBS, ("hf of several files",)))
def test_a_result_on_google_is_that_of_a_disk(on_gcs: Served, tmp_path: Path, name: str) -> None:
    publishes(on_gcs, tmp_path, name)


@pytest.mark.slow
def test_a_universal_result_is_that_of_a_disk(on_moto: Served, tmp_path: Path) -> None:
    """It holds an optimizer's state, of a model whose config is known."""
    live = model("llama", tmp_path / "model")
    weights = {name: tensor.float() for name, tensor in live.state_dict().items()}
    zero_maker.write(tmp_path / "ckpt", zero_maker.Run(2, 2, torch.bfloat16, [weights]))
    live.config.save_pretrained(tmp_path / "ckpt")
    for out in (on_moto.at("out"), tmp_path / "disk"):
        ran = run("convert", tmp_path / "ckpt", out, "--to", "universal")
        assert ran.code == 0, ran.out
    equal(on_moto.read("out"), tmp_path / "disk")
    assert run("verify", on_moto.at("out")).code == 0
    for name, source in (("of a store", on_moto.at("out")), ("of a disk", tmp_path / "disk")):
        assert run("merge", source, tmp_path / name, "--optimizer").code == 0
    equal(read_folder(tmp_path / "of a store"), tmp_path / "of a disk")


@pytest.mark.slow
def test_a_result_of_ocdbt_has_the_tensors_of_one_on_a_disk(on_moto: Served, tmp_path: Path) -> None:
    """Names of its data files are new in each run."""
    for out in (on_moto.at("orbax"), tmp_path / "disk"):
        assert run("convert", FIXTURES / HF, out, "--to", "orbax").code == 0
    assert not any(name.startswith(".fastshard/") for name in on_moto.read("orbax"))
    assert run("verify", on_moto.at("orbax")).code == 0
    assert run("diff", on_moto.at("orbax"), tmp_path / "disk").code == 0


@pytest.mark.slow
def test_a_store_without_conditions_is_refused_unless_it_is_accepted(
    rclone: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, source, *options = JOBS["hf of several files"]
    assert run(command, FIXTURES / source, tmp_path / "disk", *options).code == 0
    with FaultProxy(rclone.url) as proxy:
        # It answers reads of a part with status 200, which is refused.
        proxy.inject(Fault.PARTIAL_206)
        served = serve(rclone, proxy.url, monkeypatch)
        ran = run(command, FIXTURES / source, served.at("out"), *options)
        (finding,) = ran.errors
        assert ran.code == 2 and finding["code"] == "FS514", ran.out
        assert "--accept unconditional" in json.dumps(finding["run"]), ran.out
        assert served.read("out") == {}
        ran = run(command, FIXTURES / source, served.at("out"), *options, "--accept", "unconditional")
        assert ran.code == 0, ran.out
        assert ran.having("FS528") or any("conditional writes" in f["message"] for f in ran.findings), ran.out
        equal(served.read("out"), tmp_path / "disk")
        assert run("verify", served.at("out")).code == 0


# --- faults


#: A job of small files, with an index that is put last.
SMALL = JOBS["hf of several files"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 2 files, of which the first is uploaded in 3 parts."""
    folder = tmp_path_factory.mktemp("large")
    values = np.random.default_rng(3)
    for number, rows in ((1, 4500), (2, 100)):
        tensors = {f"layer{number}.weight": values.standard_normal((rows, 1024), np.float32)}
        save_file(tensors, folder / f"model-{number:05d}-of-00002.safetensors")
    return folder


@dataclass(frozen=True)
class Spoiled:
    """A server behind a proxy that spoils answers, and results to be published there."""

    served: Served
    proxy: FaultProxy
    disk: Path
    argv: tuple[object, ...]
    options: tuple[str, ...]

    def publish(self, *more: str) -> Ran:
        return run(*self.argv, self.served.at("out"), *self.options, *more)

    def survives(self) -> Ran:
        """Publishes; asserts that the result is complete."""
        ran = self.publish()
        assert self.proxy.spoiled
        assert ran.code == 0 and not ran.errors, ran.out
        self.proxy.clear()
        self.is_complete()
        return ran

    def is_refused(self, *codes: str) -> Ran:
        """Publishes; asserts that it fails with one finding, and that nobody takes what is there for a
        result."""
        ran = self.publish()
        assert self.proxy.spoiled
        (finding,) = ran.errors
        assert finding["code"] in codes, ran.out
        assert ran.code == (1 if ran.doc["verdict"] == "PROBLEM" else 2), ran.out
        assert not ran.doc["written"]
        self.proxy.clear()
        self.is_no_result()
        return ran

    def is_no_result(self) -> None:
        """Asserts that there is nothing, or that readers refuse it and that the run can be continued."""
        left = self.served.read("out")
        if left:
            assert CLAIM in left, sorted(left)
            read = run("verify", self.served.at("out"))
            (refused,) = read.errors
            assert read.code == 2 and refused["code"] == "FS508", read.out
        ran = self.publish("--resume") if left else self.publish()
        assert ran.code == 0, ran.out
        self.is_complete()

    def is_complete(self) -> None:
        equal(self.served.read("out"), self.disk)
        assert run("verify", self.served.at("out")).code == 0


@pytest.fixture
def behind(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, FaultProxy]]:
    # Runs of this process have ended when they are continued.
    monkeypatch.setattr(claims._core, "is_process_dead", lambda process: (True, process))
    monkeypatch.setattr(result_prefix, "_PAUSE", 0.01)
    with FaultProxy(moto.url) as proxy:
        yield serve(moto, proxy.url, monkeypatch), proxy


@pytest.fixture
def spoiled(behind: tuple[Served, FaultProxy], tmp_path: Path) -> Spoiled:
    command, source, *options = SMALL
    assert run(command, FIXTURES / source, tmp_path / "disk", *options).code == 0
    return Spoiled(*behind, tmp_path / "disk", (command, FIXTURES / source), tuple(options))


@pytest.fixture
def spoiled_large(behind: tuple[Served, FaultProxy], large: Path, tmp_path: Path) -> Spoiled:
    options = ("--max-shard-size", "19MB")
    assert run("merge", large, tmp_path / "disk", *options).code == 0
    return Spoiled(*behind, tmp_path / "disk", ("merge", large), options)


@pytest.fixture
def spoiled_single(behind: tuple[Served, FaultProxy], large: Path, tmp_path: Path) -> Spoiled:
    """A result of one file, which is put last, in 3 parts."""
    assert run("merge", large, tmp_path / "disk").code == 0
    assert sorted(read_folder(tmp_path / "disk")) == [MANIFEST, "model.safetensors"]
    return Spoiled(*behind, tmp_path / "disk", ("merge", large), ())


@pytest.fixture(params=["seaweedfs", "google"])
def elsewhere(
    request: pytest.FixtureRequest, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Spoiled]:
    """The large result, on other servers."""
    monkeypatch.setattr(claims._core, "is_process_dead", lambda process: (True, process))
    monkeypatch.setattr(result_prefix, "_PAUSE", 0.01)
    options = ("--max-shard-size", "19MB")
    assert run("merge", large, tmp_path / "disk", *options).code == 0
    if request.param == "google":
        with GcsServer(BEARER, page=1000) as server, FaultProxy(server.url) as proxy:
            server.buckets[BUCKET] = {}
            open_with(monkeypatch, "gs", server.options | {"base_url": proxy.url}, HANG)
            served = Served(f"gs://{BUCKET}/run", lambda name: read_google(server, f"run/{name}/"))
            yield Spoiled(served, proxy, tmp_path / "disk", ("merge", large), options)
        return
    server = request.getfixturevalue("seaweedfs")
    with FaultProxy(server.url) as proxy:
        served = serve(server, proxy.url, monkeypatch)
        yield Spoiled(served, proxy, tmp_path / "disk", ("merge", large), options)


def begun_uploads(server: S3Server, served: Served) -> list[str]:
    """Keys of uploads in parts that have neither been completed nor aborted."""
    root = served.address.removeprefix(f"s3://{BUCKET}/")
    found = server.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return [entry["Key"] for entry in found if entry["Key"].startswith(f"{root}/")]


def give_up_soon(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives up what never succeeds: the deadline ends repetitions alone, however slow this host is."""
    patience = {"timeout": f"{HANG:g}s", "connect_timeout": f"{HANG:g}s"}
    open_with(monkeypatch, "s3", {"endpoint": proxy.url, **patience}, SOON)


def nth(when: Callable[[Request], bool], number: int) -> Callable[[Request], bool]:
    """Whether a request is the one of a number, from 1, of those for which ``when`` is true."""
    seen = itertools.count(1)
    return lambda request: when(request) and next(seen) == number


PASSING = (Fault.STATUS_500, Fault.STATUS_503, Fault.LOST_REQUEST, Fault.LOST_ANSWER)
AT_ONCE = at_once(PASSING, (Fault.LOST_ANSWER,))
#: Puts of a published result, in their order.
PUTS = {
    "the claim": is_put_of(CLAIM),
    "a file": is_put_of(".safetensors"),
    "the manifest": is_put_of(MANIFEST),
    "the last object": is_put_of(INDEX),
}


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda fault: fault.name)
@pytest.mark.parametrize("put", PUTS)
def test_a_put_that_fails_once_is_survived(spoiled: Spoiled, fault: Fault, put: str) -> None:
    spoiled.proxy.inject(fault, 1, PUTS[put])
    spoiled.survives()


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.name)
def test_the_second_put_of_the_claim_that_fails_once_is_survived(spoiled: Spoiled, fault: Fault) -> None:
    """It shows whether the store honours conditions."""
    spoiled.proxy.inject(fault, 1, nth(PUTS["the claim"], 2))
    spoiled.survives()


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.name)
def test_a_beat_that_fails_once_is_survived(spoiled: Spoiled, fault: Fault) -> None:
    """The last beat is that before the manifest is put."""
    spoiled.proxy.inject(fault, 1, nth(PUTS["the claim"], 3))
    spoiled.survives()


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda fault: fault.name)
def test_a_removal_that_fails_once_is_survived(spoiled: Spoiled, fault: Fault) -> None:
    spoiled.proxy.inject(fault, 1, is_removal)
    ran = spoiled.publish()
    assert spoiled.proxy.spoiled and ran.code == 0, ran.out
    left = spoiled.served.read("out")
    if CLAIM in left:
        # The result is complete, and a warning says what stays.
        assert ran.having("FS508", message="its claim could not be removed"), ran.out
        del left[CLAIM]
    equal(left, spoiled.disk)
    assert run("verify", spoiled.served.at("out")).code == 0


def test_records_that_cannot_be_removed_are_left_with_a_warning(spoiled: Spoiled) -> None:
    spoiled.proxy.inject(Fault.STATUS_403, None, is_removal)
    ran = spoiled.publish()
    assert ran.code == 0 and not ran.errors, ran.out
    (warning,) = ran.having("FS508", message="its claim could not be removed")
    assert warning["run"] == [f"fastshard clean {spoiled.served.at('out')}"]
    left = spoiled.served.read("out")
    assert CLAIM in left
    equal({name: content for name, content in left.items() if name != CLAIM}, spoiled.disk)
    assert run("verify", spoiled.served.at("out")).code == 0
    assert run("merge", spoiled.served.at("out"), spoiled.disk.with_name("merged")).code == 0


def test_the_command_that_a_warning_names_removes_the_claim(spoiled: Spoiled) -> None:
    spoiled.proxy.inject(Fault.STATUS_403, None, is_removal)
    (warning,) = spoiled.publish().having("FS508")
    spoiled.proxy.clear()
    (command,) = warning["run"]
    assert run(*command.split()[1:]).code == 0
    spoiled.is_complete()


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda fault: fault.name)
@pytest.mark.parametrize("put", PUTS)
def test_a_put_that_always_fails_is_one_finding(
    spoiled: Spoiled, fault: Fault, put: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(spoiled.proxy, monkeypatch)
    spoiled.proxy.inject(fault, None, PUTS[put])
    if fault is Fault.LOST_ANSWER and put in ("a file", "the manifest", "the last object"):
        # It is there, and is found there.
        spoiled.survives()
    else:
        spoiled.is_refused("FS507")


@pytest.mark.parametrize("put", at_once(PUTS, ("the manifest",)))
def test_a_put_without_the_right_is_one_finding(spoiled: Spoiled, put: str) -> None:
    spoiled.proxy.inject(Fault.STATUS_403, None, PUTS[put])
    ran = spoiled.is_refused("FS502")
    assert "put and delete" in ran.out


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda fault: fault.name)
@pytest.mark.parametrize("times", at_once([1, 3], (3,)))
def test_a_part_that_fails_is_sent_again(spoiled_large: Spoiled, fault: Fault, times: int) -> None:
    spoiled_large.proxy.inject(fault, times, is_part)
    spoiled_large.survives()


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda fault: fault.name)
def test_an_upload_of_which_a_part_always_fails_is_one_finding(
    spoiled_large: Spoiled, fault: Fault, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(spoiled_large.proxy, monkeypatch)
    spoiled_large.proxy.inject(
        fault, None, lambda request: is_part(request) and "partNumber=2" in request.path
    )
    spoiled_large.is_refused("FS507")
    assert begun_uploads(moto, spoiled_large.served) == []


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda fault: fault.name)
def test_a_completion_that_fails_once_is_survived(spoiled_large: Spoiled, fault: Fault) -> None:
    spoiled_large.proxy.inject(fault, 1, is_completion)
    spoiled_large.survives()


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda fault: fault.name)
def test_a_beginning_of_an_upload_that_fails_once_is_survived(spoiled_large: Spoiled, fault: Fault) -> None:
    spoiled_large.proxy.inject(fault, 1, is_begin)
    spoiled_large.survives()


#: Requests by which the only file of a result is put.
STEPS = {
    "its upload begins": is_begin,
    "a part": is_part,
    "its completion": is_completion,
    "the manifest": is_put_of(MANIFEST),
}


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda fault: fault.name)
@pytest.mark.parametrize("step", STEPS)
def test_an_only_file_survives_what_fails_once(spoiled_single: Spoiled, fault: Fault, step: str) -> None:
    spoiled_single.proxy.inject(fault, 1, STEPS[step])
    spoiled_single.survives()


@pytest.mark.parametrize("step", at_once(STEPS, ("its completion",)))
def test_an_only_file_without_the_right_is_no_result(
    spoiled_single: Spoiled, step: str, moto: S3Server
) -> None:
    spoiled_single.proxy.inject(Fault.STATUS_403, None, STEPS[step])
    spoiled_single.is_refused("FS502")
    assert begun_uploads(moto, spoiled_single.served) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.name)
@pytest.mark.parametrize("step", ["the claim", *STEPS])
def test_what_fails_once_on_another_server_is_survived(elsewhere: Spoiled, fault: Fault, step: str) -> None:
    elsewhere.proxy.inject(fault, 1, (STEPS | PUTS)[step])
    elsewhere.survives()


@pytest.mark.parametrize("fault", [Fault.NO_LIST, Fault.SHORT_LIST], ids=lambda fault: fault.name)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_list_that_is_late_once_is_survived(spoiled: Spoiled, fault: Fault, number: int) -> None:
    spoiled.proxy.inject(fault, 1, nth(is_list, number))
    spoiled.survives()


@pytest.mark.parametrize("fault", [Fault.NO_LIST, Fault.SHORT_LIST], ids=lambda fault: fault.name)
def test_a_list_that_stays_late_is_no_result(spoiled: Spoiled, fault: Fault) -> None:
    spoiled.proxy.inject(fault, None, is_list)
    ran = spoiled.publish()
    assert ran.code in (1, 2) and ran.errors and {f["code"] for f in ran.errors} == {"FS517"}, ran.out
    spoiled.proxy.clear()
    spoiled.is_no_result()


def test_an_older_result_that_a_list_lacks_once_is_kept(spoiled: Spoiled) -> None:
    assert spoiled.publish().code == 0
    before = spoiled.served.read("out")
    spoiled.proxy.inject(Fault.NO_LIST, 1, is_list)
    ran = spoiled.publish()
    assert ran.code == 2 and ran.having("FS504"), ran.out
    assert spoiled.served.read("out") == before


@pytest.mark.parametrize("fault", [Fault.STATUS_403, Fault.LOST_REQUEST], ids=lambda fault: fault.name)
def test_what_a_failed_run_says_holds_no_credentials(
    spoiled: Spoiled, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(spoiled.proxy, monkeypatch)
    spoiled.proxy.inject(fault, None, PUTS["a file"])
    with logger_restored():
        ran = cli(*spoiled.argv, spoiled.served.at("out"), *spoiled.options, "-vv", json_output=False)
    assert ran.code == 2 and spoiled.served.at("out") in ran.err
    for secret in (SECRET_KEY, ACCESS_KEY, "Signature", "uploadId"):
        assert secret not in ran.out + ran.err, secret


@pytest.mark.slow
def test_a_slow_network_is_survived(
    moto: S3Server, spoiled_large: Spoiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(moto.url, rate=1 << 20) as slow:
        monkeypatch.setenv("AWS_ENDPOINT_URL", slow.url)
        ran = spoiled_large.publish()
        assert ran.code == 0 and not ran.errors, ran.out
        spoiled_large.is_complete()
