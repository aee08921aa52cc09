"""OpenSSF model-signing signatures, verified by its own library with local keys or certificates."""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import importlib
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..common import codes, json_text, safe_files
from ..common.errors import FastshardError, Finding
from ..common.optional_imports import imported
from ..common.records import dataclass
from ..common.regex import compile_when_used

__all__ = ["check"]

#: Maximum size of a signature in bytes; it names each file.
_MAX_SIGNATURE = 256 << 20
#: Maximum number of characters of a message to show.
_MOST_CHARACTERS = 20_000
#: Lengths of digests in bytes.
_LENGTHS = (20, 28, 32, 48, 64)


def check(
    folder: Path, signature: Path, public_key: Path | None = None, certificates: Iterable[Path] = ()
) -> list[Finding]:
    """Compare a folder with its signature; return no findings if every file is as signed.

    Args:
        folder: the signed folder.
        signature: the signature (``model.sig``).
        public_key: PEM of the public key of the signer.
        certificates: PEMs of the chain of the signing certificate.

    Raises:
        FastshardError: ``FS515`` unless the caller passes exactly one of the two; ``FS514`` without the
            library; ``FS501`` and the like for files that cannot be read.
    """
    certificates = list(certificates)
    if (public_key is None) == (not certificates):
        raise FastshardError.of(
            codes.USAGE,
            "verifying a signature needs a public key or certificates",
            help="pass --public-key FILE, or --certificate-chain FILE",
        )
    library = imported(
        "model_signing",
        "model_signing.verifying",
        purpose="signatures are verified by model-signing",
        extra="sign",
    )
    # The library reads them again, and would wait for a pipe.
    content, *_ = (
        safe_files.read_bytes(path, _MAX_SIGNATURE, code=codes.NOT_A_CHECKPOINT)
        for path in (signature, *_keys(public_key, certificates))
    )
    config = library.verifying.Config()
    try:
        if public_key is not None:
            config.use_elliptic_key_verifier(public_key=public_key)
        else:
            config.use_certificate_verifier(certificate_chain=certificates)
    except Exception as error:
        told = " ".join(str(error).split())
        which = str(_keys(public_key, certificates)[0])
        raise FastshardError.of(
            codes.USAGE,
            f"no usable key or certificate: {told}",
            file=which,
            help="pass a PEM file with an elliptic-curve public key, or with certificates",
        ) from None
    try:
        # It prints warnings.
        with contextlib.redirect_stdout(io.StringIO()):
            config.verify(folder, signature)
    except Exception as error:
        # The library raises what its parsers do: whatever it is, nothing is vouched for.
        return [_mismatch(error, content, folder, signature, public_key, certificates)]
    return []


def _mismatch(
    error: Exception,
    content: bytes,
    folder: Path,
    signature: Path,
    public_key: Path | None,
    certificates: Sequence[Path],
) -> Finding:
    """Make the finding that names the mismatch: the signature file, the key, the chain, or the files.

    Args:
        error: the library's error.
        content: content of the signature.
        folder: the signed folder.
        signature: the signature.
        public_key: PEM of the key that was passed.
        certificates: PEMs of the chain that was passed.
    """
    found = _readable(" ".join(str(error).split())) or type(error).__name__

    def finding(message: str, expected: str, help_: str, got: str = found, **more: Any) -> Finding:
        return Finding.of(
            codes.SIGNATURE, message, file=signature.name, expected=expected, got=got, help=help_, **more
        )

    signed = _Signed.of(content)
    passed = " and ".join(path.name for path in _keys(public_key, certificates))
    if signed is None:
        return finding(
            "the file is not a model-signing signature, or it is truncated",
            "a signature (model.sig)",
            "copy the signature file again from whoever signed the files",
        )
    if signed.has_key != (public_key is not None):
        signer, option = (
            ("key", "--public-key FILE") if signed.has_key else ("certificate", "--certificate-chain FILE")
        )
        return finding(
            f"the signature was made with a {signer}, but "
            f"{'certificates were' if signed.has_key else 'a public key was'} passed",
            f"the signer's {signer if signed.has_key else 'certificate chain'}",
            f"pass the signer's {'public key' if signed.has_key else 'certificates'} instead of {passed}",
            passed,
            run=[option],
        )
    if public_key is not None and signed.hint not in (None, _hint(public_key)):
        return finding(
            "the signature was made with another key",
            f"a signature by the key of {passed}",
            "pass the signer's key, if you trust it",
            f"a key whose SHA-256 is {signed.hint}",
            run=["--public-key FILE"],
        )
    if type(error).__name__ == "X509StoreContextError":
        return finding(
            "the signature was made with a certificate of another chain",
            f"a certificate that belongs to {passed}",
            "pass the signer's chain, if you trust it",
            run=["--certificate-chain FILE"],
        )
    if type(error).__name__ == "InvalidSignature":
        either = signed.hint is None and public_key is not None
        return finding(
            "the signature was made with another key, or was changed later"
            if either
            else "the signature was changed after it was made",
            f"a signature by the key of {passed}",
            "pass the signer's key, or copy the signature file again from whoever signed the files"
            if either
            else "copy the signature file again from whoever signed the files",
            "a value that does not match the signed content",
        )
    if signed.is_of_others(folder, str(error)):
        return finding(
            "the signature is of another checkpoint: no file is as it was signed",
            f"files as they were signed, by the key of {passed}",
            "pass the signature of this checkpoint",
            run=["--signature FILE"],
        )
    return finding(
        "the signature does not match the files",
        f"files as they were signed, by the key of {passed}",
        "copy the files again from whoever signed them; if they were changed on purpose, have them signed "
        "again",
    )


@dataclass(frozen=True)
class _Signed:
    """The content of a signature, which is not verified without its key."""

    #: SHA-256 of the PEM of the signer's public key, in hexadecimal; None if it is not stated.
    hint: str | None
    #: True for a signature by a key, False for one by a certificate.
    has_key: bool
    #: Names of the files; empty if parts of files are signed.
    names: Sequence[str]

    @classmethod
    def of(cls, content: bytes) -> _Signed | None:
        """Read a signature; return None if it is not a signature."""
        try:
            bundle = json_text.load(content)
            material, envelope = bundle["verificationMaterial"], bundle["dsseEnvelope"]
            has_key = "publicKey" in material
            if not (has_key or material["x509CertificateChain"]["certificates"][0]["rawBytes"]):
                return None
            hint = material["publicKey"].get("hint") if has_key else None
            base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
            payload = json_text.load(base64.b64decode(envelope["payload"], validate=True))
            # Versions before 1.0 list the files as subjects.
            resources = payload["predicate"].get("resources") or payload["subject"]
            of_files = payload["predicate"].get("serialization", {}).get("method", "files") == "files"
            return cls(hint or None, has_key, [str(one["name"]) for one in resources] if of_files else [])
        except (FastshardError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            return None

    def is_of_others(self, folder: Path, found: str) -> bool:
        """Return True if, by the library's list of differences, no file of a folder is as signed."""
        if not self.names or not found.startswith("Signature mismatch"):
            return False
        kept = sum(os.path.lexists(folder / name) for name in self.names)
        return kept == found.count("Hash mismatch for ")


def _hint(public_key: Path) -> str:
    """Return the name of a key in a signature."""
    serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
    key = serialization.load_pem_public_key(
        safe_files.read_bytes(public_key, _MAX_SIGNATURE, code=codes.NOT_A_CHECKPOINT)
    )
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.PEM, form)).hexdigest()


#: A digest in the library's messages: its ``repr``, or, inside a list of strings, the ``repr`` of that.
_DIGEST = compile_when_used(
    r"""Digest\(algorithm=\\?'(\w+)\\?', digest_value=(b\\?'.{0,400}?\\?'|b".{0,400}?")\)"""
)


def _readable(message: str) -> str:
    """Format a message of the library, with digests in hexadecimal."""

    def digest(found: re.Match[str]) -> str:
        value = _bytes(found[2])
        return found[0] if value is None else f"{found[1]}:{value.hex()}"

    message = message[:_MOST_CHARACTERS]
    # Several are a list of texts.
    what, opens, rest = message.partition(": [")
    if opens:
        with contextlib.suppress(ValueError, SyntaxError):
            message = f"{what}: {'; '.join(map(str, ast.literal_eval(f'[{rest}')))}"
    return _DIGEST.sub(digest, message)


def _bytes(literal: str) -> bytes | None:
    """Parse bytes from their ``repr``, or from the ``repr`` of that; return None for other texts."""
    for text in (literal, literal.encode().decode("unicode_escape")):
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
            if isinstance(value, bytes) and len(value) in _LENGTHS:
                return value
    return None


def _keys(public_key: Path | None, certificates: Sequence[Path]) -> list[Path]:
    return [*certificates] if public_key is None else [public_key]
