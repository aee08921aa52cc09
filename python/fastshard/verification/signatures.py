"""Signatures of OpenSSF model-signing, verified by its own library with keys or certificates that are at hand."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..common import safe_files
from ..common.errors import FastshardError, Finding
from ..common.optional_imports import imported

__all__ = ["check"]

#: Bytes at most of a signature: it names each file.
_MAX_SIGNATURE = 256 << 20
#: Characters of a message that are shown.
_MAX_TOLD = 20_000
#: Bytes of digests.
_LENGTHS = (20, 28, 32, 48, 64)


def check(
    folder: Path, signature: Path, public_key: Path | None = None, certificates: Iterable[Path] = ()
) -> list[Finding]:
    """What is wrong with a folder by a signature of it: nothing if every file is as it was signed.

    Args:
        folder: what was signed.
        signature: the signature (``model.sig``).
        public_key: PEM of the key whose other half has signed.
        certificates: PEMs of the chain that the signing certificate belongs to.

    Raises:
        FastshardError: ``FS515`` unless one of the two is given; ``FS514`` without the library; ``FS501`` and the like for
            files that cannot be read.
    """
    certificates = list(certificates)
    if (public_key is None) == (not certificates):
        raise FastshardError.of(
            "FS515",
            "a signature is verified with a public key, or with certificates",
            help="pass --public-key FILE, or --certificate-chain FILE",
        )
    library = imported(
        "model_signing",
        "model_signing.verifying",
        told="signatures are verified by model-signing",
        extra="sign",
    )
    for path in (signature, *_keys(public_key, certificates)):
        # It is read again by the library, which waits for a pipe.
        safe_files.read_bytes(path, _MAX_SIGNATURE, code="FS513")
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
            "FS515",
            f"no key or certificate that can be used: {told}",
            file=which,
            help="pass the PEM of a public key of an elliptic curve, or of certificates",
        ) from None
    try:
        config.verify(folder, signature)
    except Exception as error:
        # The library raises what its parsers do: whatever it is, nothing is vouched for.
        told = _readable(" ".join(str(error).split())) or type(error).__name__
        return [
            Finding.of(
                "FS315",
                "the signature does not match the files",
                file=signature.name,
                expected=f"files as they were signed, by the key of {' and '.join(p.name for p in _keys(public_key, certificates))}",
                got=told,
                help="copy the files again from whoever has signed them; if they were changed on purpose, have them signed again",
            )
        ]
    return []


#: A digest as the library's messages show it: by ``repr``, once or, inside of a list of texts, twice.
_DIGEST = re.compile(r"""Digest\(algorithm=\\?'(\w+)\\?', digest_value=(b\\?'.{0,400}?\\?'|b".{0,400}?")\)""")


def _readable(told: str) -> str:
    """A message of the library, with digests as people write them."""

    def digest(found: re.Match[str]) -> str:
        value = _bytes(found[2])
        return found[0] if value is None else f"{found[1]}:{value.hex()}"

    told = told[:_MAX_TOLD]
    # Several are a list of texts.
    what, opens, rest = told.partition(": [")
    if opens:
        with contextlib.suppress(ValueError, SyntaxError):
            told = f"{what}: {'; '.join(map(str, ast.literal_eval(f'[{rest}')))}"
    return _DIGEST.sub(digest, told)


def _bytes(literal: str) -> bytes | None:
    """Bytes by their ``repr``, or by the ``repr`` of that; None for what is neither."""
    for text in (literal, literal.encode().decode("unicode_escape")):
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
            if isinstance(value, bytes) and len(value) in _LENGTHS:
                return value
    return None


def _keys(public_key: Path | None, certificates: Sequence[Path]) -> list[Path]:
    return [*certificates] if public_key is None else [public_key]
