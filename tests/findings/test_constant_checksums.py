"""The CRC32 of a constant is made without its bytes, and tells zeros from copies however large they are."""

from __future__ import annotations

import zlib

from fastshard import _core
from fastshard.sources.zero import cross_checks
from hypothesis import example, given
from hypothesis import strategies as st

MIB = 1 << 20


@given(st.binary(min_size=1, max_size=9), st.integers(0, 20_000))
@example(b"\0", 0)
@example(b"\0\0\x80\x3f", 3)
@example(b"\0\0\x80\x3f", 5 * MIB)
def test_a_constant_has_the_checksum_of_its_bytes(pattern: bytes, length: int) -> None:
    every = (pattern * (length // len(pattern) + 1))[:length]
    assert _core.crc32_of_constant(pattern, length) == zlib.crc32(every)


def test_large_storages_of_zeros_or_ones_are_constant() -> None:
    # What used to be larger than was looked at.
    size = 300 * MIB
    for pattern in (bytes(MIB), b"\0\0\x80\x3f" * (MIB // 4)):
        crc = 0
        for _ in range(size // MIB):
            crc = zlib.crc32(pattern, crc)
        assert cross_checks._is_constant(crc, size)
        assert not cross_checks._is_constant(crc ^ 1, size)
