"""Statements and signatures, read by the tools that they are for."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from blake3 import blake3
from helpers import NEOX, cli
from holding import interrupted_hashing
from safetensors import safe_open

ROOT = Path(__file__).parents[2]


@pytest.fixture
def result(tmp_path: Path) -> Path:
    fastshard.convert(NEOX, tmp_path / "out", to="hf", max_shard_size="64KB")
    return tmp_path / "out"


def test_a_statement_names_files_and_tensors_by_their_digests(result: Path) -> None:
    statement_of = pytest.importorskip("in_toto_attestation.v1.statement", reason="pip install '.[sign]'")
    resource = pytest.importorskip(
        "in_toto_attestation.v1.resource_descriptor", reason="pip install '.[sign]'"
    )
    files = {p.name: p for p in result.iterdir()}
    assert cli("attest", result).code == 0
    statement = json.loads((result / "fastshard.intoto.json").read_text())
    subjects = {s["name"]: s["digest"] for s in statement["subject"]}
    for name, path in files.items():
        # The id that Git LFS and Hugging Face's hub know a file by.
        assert subjects.pop(name) == {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    for name, digest in subjects.items():
        file, _, tensor = name.partition("#")
        with safe_open(result / file, framework="pt") as held:
            data = held.get_tensor(tensor)
        data = data.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert digest == {"blake3": blake3(data.tobytes()).hexdigest()}
    assert len(subjects) == len(fastshard.open(result))
    # in-toto's own reader.
    described = [
        resource.ResourceDescriptor(name=s["name"], digest=s["digest"]).pb for s in statement["subject"]
    ]
    statement_of.Statement(described, statement["predicateType"], statement["predicate"]).validate()
    assert statement["predicate"]["verified"] and statement["predicate"]["kind"] == "hf"
    # It is made of the result and no part of it.
    ran = cli("verify", result)
    assert ran.code == 0 and not ran.having("FS108")
    assert cli("attest", result).code == 0, "a statement may be made again"


def test_what_differs_from_its_manifest_is_not_attested(result: Path) -> None:
    file = max(result.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    ran = cli("attest", result)
    assert ran.code == 1 and not (result / "fastshard.intoto.json").exists()
    assert cli("attest", result, "--no-verify").code == 0
    assert json.loads((result / "fastshard.intoto.json").read_text())["predicate"]["verified"] is False


def test_a_signal_ends_the_hashing_of_files(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastshard.verification.file_pieces._PIECE", 1)
    with interrupted_hashing(monkeypatch), pytest.raises(KeyboardInterrupt):
        fastshard.attest(result, verify=False, threads=2)
    assert not (result / "fastshard.intoto.json").exists()


def test_a_file_of_the_users_is_not_written_over(result: Path) -> None:
    (result / "notes.json").write_text("{}")
    ran = cli("attest", result, "-o", result / "notes.json")
    assert ran.code == 2 and (result / "notes.json").read_text() == "{}"
    about = (ROOT / "FORMAT.md").read_text()
    (result / "about.md").write_text(about)
    ran = cli("attest", result, "-o", result / "about.md")
    assert ran.code == 2 and (result / "about.md").read_text() == about, (
        "a text that speaks of statements is none"
    )
    assert cli("attest", NEOX).findings[0]["code"] == "FS518"
    (result / "config.json").unlink()
    assert cli("attest", result).code == 3


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"name": "../secret.txt", "size": 4}]},
        {"files": [{"name": ["a"]}]},
        {"files": [{"name": "a\0b"}]},
        {"findings": "all well"},
        {"sources": {"a": 1}},
        {"value_ops": [1]},
        {"provenance": [1]},
        {"provenance": {"parts": [{"bytes": "many"}]}},
        {"topology": [1]},
        {"tensors": [{"name": 5, "blake3": ""}]},
    ],
)
def test_a_manifest_that_says_odd_things_is_refused_by_name(result: Path, change: dict[str, object]) -> None:
    (result.parent / "secret.txt").write_text("well")
    file = result / "fastshard.manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    ran = cli("attest", result, "--no-verify")
    assert ran.code != 0
    assert [f["code"] for f in ran.errors] == ["FS518"] and not (result / "fastshard.intoto.json").exists()
    page = cli("report", result, "-o", result.parent / "page.html")
    assert page.code == 0 and not page.having("FS520")


def test_one_path_too_many_is_bad_usage(result: Path) -> None:
    for argv in (("attest", result, "extra"), ("zero-to-fp32", result, result, "extra")):
        ran = cli(*argv)
        assert ran.code == 2 and "unrecognized arguments: extra" in ran.findings[0]["message"]


def test_a_result_with_a_statement_in_it_is_not_replaced(result: Path) -> None:
    """It, or a signature, is about what is there; nobody's work is taken away."""
    fastshard.attest(result)
    ran = cli("convert", NEOX, result, "--to", "hf", "--overwrite")
    assert ran.having("FS504", got="fastshard.intoto.json") and ran.code == 2
    (result / "fastshard.intoto.json").unlink()
    assert cli("convert", NEOX, result, "--to", "hf", "--overwrite").code == 0


# --- signatures of OpenSSF model-signing


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("model_signing", reason="pip install '.[sign]'")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        key = ec.generate_private_key(ec.SECP256R1())
        (folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (folder / f"{name}.pub").write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
    return folder


def model_signing(*argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "model_signing", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def signed(result: Path, keys: Path) -> Path:
    done = model_signing(
        "sign", "key", result, "--signature", result / "model.sig", "--private_key", keys / "ours.key"
    )
    assert done.returncode == 0, done.stderr
    return result


def test_what_was_signed_is_verified_by_both(signed: Path, keys: Path) -> None:
    done = model_signing(
        "verify", "key", signed, "--signature", signed / "model.sig", "--public_key", keys / "ours.pub"
    )
    assert done.returncode == 0, done.stderr
    ran = cli("verify", signed, "--signature", signed / "model.sig", "--public-key", keys / "ours.pub")
    assert ran.code == 0 and ran.doc["ok"]
    assert not ran.having("FS108"), "a signature is no stranger"


def test_another_key_vouches_for_nothing(signed: Path, keys: Path) -> None:
    ran = cli("verify", signed, "--signature", signed / "model.sig", "--public-key", keys / "theirs.pub")
    (finding,) = ran.having("FS315")
    assert ran.code == 1 and "theirs.pub" in finding["expected"]
    assert "made with another key" in finding["message"] and finding["help"].startswith(
        "pass the signer's key"
    )


def signature_of(signed: Path) -> dict[str, Any]:
    return json.loads((signed / "model.sig").read_text())  # type: ignore[no-any-return]


def without_hint(signed: Path) -> None:
    """As versions before 1.0 sign; the library prints a warning of it."""
    content = signature_of(signed)
    del content["verificationMaterial"]["publicKey"]["hint"]
    (signed / "model.sig").write_text(json.dumps(content))


def cut_short(signed: Path) -> None:
    file = signed / "model.sig"
    file.write_bytes(file.read_bytes()[:-40])


def with_other_payload(signed: Path) -> None:
    content = signature_of(signed)
    payload = json.loads(base64.b64decode(content["dsseEnvelope"]["payload"]))
    payload["predicate"]["resources"][0]["digest"] = "00" * 32
    content["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    (signed / "model.sig").write_text(json.dumps(content))


def of_another_checkpoint(signed: Path) -> None:
    for file in signed.iterdir():
        if file.name != "model.sig":
            file.write_bytes(file.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("change", "key", "message", "help_"),
    [
        (
            without_hint,
            "theirs.pub",
            "made with another key, or was changed later",
            "pass the signer's key, or copy",
        ),
        (
            cut_short,
            "ours.pub",
            "not a model-signing signature, or it is truncated",
            "copy the signature file again",
        ),
        (
            with_other_payload,
            "ours.pub",
            "the signature was changed after it was made",
            "copy the signature file",
        ),
        (of_another_checkpoint, "ours.pub", "of another checkpoint", "pass the signature of this checkpoint"),
    ],
)
def test_each_cause_of_a_mismatch_is_named(
    change: Callable[[Path], None], key: str, message: str, help_: str, signed: Path, keys: Path
) -> None:
    change(signed)
    ran = cli("verify", signed, "--signature", signed / "model.sig", "--public-key", keys / key)
    (finding,) = ran.having("FS315")
    assert ran.code == 1 and message in finding["message"] and finding["help"].startswith(help_), finding


def certificate(folder: Path, name: str) -> Path:
    """A key and a certificate that it signed itself, which is its own chain; the certificate's file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = [
        name == "digital_signature"
        for name in (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        )
    ]
    made = (
        x509.CertificateBuilder(who, who, key.public_key(), 1)
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(2120, 1, 1))
        .add_extension(x509.KeyUsage(*usage), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return folder / f"{name}.pem"


def test_a_signature_by_a_certificate_names_the_chain(result: Path, keys: Path, tmp_path: Path) -> None:
    ours, theirs = certificate(tmp_path, "us"), certificate(tmp_path, "them")
    signature = result / "model.sig"
    done = model_signing(
        "sign",
        "certificate",
        result,
        "--signature",
        signature,
        "--private_key",
        tmp_path / "us.key",
        "--signing_certificate",
        ours,
        "--certificate_chain",
        ours,
    )
    assert done.returncode == 0, done.stderr
    sig = ("verify", result, "--signature", signature)
    assert cli(*sig, "--certificate-chain", ours).code == 0
    (other,) = cli(*sig, "--certificate-chain", theirs).having("FS315")
    assert "certificate of another chain" in other["message"] and "them.pem" in other["expected"]
    (key,) = cli(*sig, "--public-key", keys / "ours.pub").having("FS315")
    assert "made with a certificate, but a public key was passed" in key["message"]
    assert "--certificate-chain FILE" in key["run"][0]


def test_certificates_for_a_signature_by_a_key(signed: Path, tmp_path: Path) -> None:
    chain = certificate(tmp_path, "us")
    ran = cli("verify", signed, "--signature", signed / "model.sig", "--certificate-chain", chain)
    (finding,) = ran.having("FS315")
    assert "made with a key, but certificates were passed" in finding["message"]
    assert "--public-key FILE" in finding["run"][0]


@pytest.mark.parametrize(
    "change", ["a tensor", "a config and its manifest", "a file more", "a file less", "the signature"]
)
def test_whatever_is_changed_after_signing_is_found(signed: Path, keys: Path, change: str) -> None:
    if change == "a tensor":
        file = max(signed.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif change == "a config and its manifest":
        # Whoever can write one can write the other: of this only the signature tells.
        config, manifest = signed / "config.json", signed / "fastshard.manifest.json"
        text = config.read_text().replace('"rotary_pct": 0.5', '"rotary_pct": 0.25')
        assert text != config.read_text()
        config.write_text(text)
        document = json.loads(manifest.read_text())
        for file in document["files"]:
            if file["name"] == "config.json":
                file |= {"size": len(text), "blake3": blake3(text.encode()).hexdigest()}
        manifest.write_text(json.dumps(document))
        assert cli("verify", signed).code == 0
    elif change == "a file more":
        (signed / "modeling_evil.py").write_text("")
    elif change == "a file less":
        (signed / "config.json").unlink()
    else:
        text = (signed / "model.sig").read_text()
        (signed / "model.sig").write_text(text.replace("payload", "payIoad", 1))
    ran = cli("verify", signed, "--signature", signed / "model.sig", "--public-key", keys / "ours.pub")
    assert ran.code == 1 and ran.having("FS315")


def test_odd_ways_to_ask(signed: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sig, pub = ("--signature", signed / "model.sig"), ("--public-key", keys / "ours.pub")
    assert [cli("verify", signed, *argv).findings[0]["code"] for argv in (sig, pub)] == ["FS515", "FS515"]
    assert cli("verify", signed, *sig, "--public-key", tmp_path / "nowhere").findings[0]["code"] == "FS501"
    os.mkfifo(tmp_path / "pipe")
    assert cli("verify", signed, *sig, "--public-key", tmp_path / "pipe").code == 2
    ran = cli("verify", signed, *sig, "--public-key", keys / "ours.key")
    assert (ran.code, ran.findings[0]["code"]) == (2, "FS515") and "ours.key" in ran.findings[0]["file"]
    monkeypatch.setitem(sys.modules, "model_signing", None)
    (finding,) = cli("verify", signed, *sig, *pub).having("FS514")
    assert "pip install 'model-signing" in finding["help"]
