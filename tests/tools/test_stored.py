"""Payloads as bytes and back: bit for bit, or an error that says what is wrong."""

import struct
import tracemalloc
import zlib

import goldens
import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from cases import CODECS, values
from hypothesis import given
from hypothesis import strategies as st
from parallel import same

import fftgrad as fg
from fftgrad.ops._shapes import spec

STEP = fg.Step.of(3)
VECTOR = goldens.SHORT
ROUNDED = {"fft.bin", "budget.bin", "top-k-4-bits.bin"}
"""Made by logarithms, roots and sums of products, whose last bit is each machine's own."""


@pytest.mark.parametrize("name", CODECS)
def test_a_payload_comes_back_bit_for_bit(name):
    codec, x = CODECS[name], goldens.VECTOR
    payload = messages.message(codec, x).payload
    data = fg.tools.to_bytes(payload, codec, x)
    assert len(data) == fg.wire_bytes(codec, x) + 20
    for kind in (bytes, bytearray, memoryview):
        found = fg.tools.from_bytes(kind(data), codec, x)
        assert same(found, payload)
        assert spec(found) == spec(payload)
    assert fg.tools.to_bytes(jax.tree.map(np.asarray, payload), codec, x) == data


def test_the_format_is_the_documented_one():
    codec = fg.TopK(k=1)
    x = np.array([0.0, -3.0, 1.0, 2.0], np.float32)
    configuration = zlib.crc32(b"(2, [('TopK(k=1)', (4,), 'float32')])")
    words = struct.pack("<fI", -3.0, 1 << 1)
    data = b"FFTG" + struct.pack("<HHIQ", 1, 0, configuration, 8) + words
    data += struct.pack("<I", zlib.crc32(data))
    assert fg.tools.to_bytes(messages.compress(codec, x), codec, x) == data


# Golden files


@pytest.mark.parametrize("file", goldens.STORED)
def test_an_old_file_is_read_and_written_alike(file):
    assert {path.name for path in goldens.BYTES.iterdir()} == set(goldens.STORED)
    codec, data = CODECS[goldens.STORED[file]], (goldens.BYTES / file).read_bytes()
    payload = fg.tools.from_bytes(data, codec, VECTOR)
    assert fg.tools.to_bytes(payload, codec, VECTOR) == data
    if file not in ROUNDED:
        assert goldens.stored(file) == data
    made = fg.tools.from_bytes(goldens.stored(file), codec, VECTOR)
    old, new = (messages.decompress(codec, p, VECTOR, step=STEP) for p in (payload, made))
    np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-5)


# What is no such file
CODEC = CODECS["blocked 4 bits"]
LIKE = jax.ShapeDtypeStruct((60,), "float32")
GOOD = fg.tools.to_bytes(messages.compress(CODEC, values((60,), 7)), CODEC, LIKE)


def test_every_flip_of_a_bit_and_every_length_but_one_is_refused():
    for bit in range(8 * len(GOOD)):
        bad = bytearray(GOOD)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"from_bytes\(data\): must .*, got .*; \w"):
            fg.tools.from_bytes(bad, CODEC, LIKE)
    for bad in (*(GOOD[:length] for length in range(len(GOOD))), GOOD + b"\0", GOOD + GOOD):
        with pytest.raises(ValueError, match=rf"must have {len(GOOD)} bytes .* got {len(bad)}; "):
            fg.tools.from_bytes(bad, CODEC, LIKE)


def sealed(data):
    """The bytes with the checksum that belongs to them, as whoever forges them would do."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


@pytest.mark.parametrize("place", [0, 4, 6, 8, 12])
def test_another_head_is_refused_though_its_checksum_is_right(place):
    bad = bytearray(GOOD)
    bad[place] ^= 3
    with pytest.raises(ValueError, match="must start with"):
        fg.tools.from_bytes(sealed(bytes(bad)), CODEC, LIKE)


@pytest.mark.parametrize(
    ("codec", "x"),
    [
        (fg.Cast("bfloat16"), np.arange(3, dtype=np.float32)),
        (fg.chain(fg.TopK(k=3), fg.Cast("bfloat16")), np.arange(1, 61, dtype=np.float32)),
    ],
)
def test_what_fills_the_word_of_a_leaf_must_be_zero(codec, x):
    """Or two files would mean the same payload."""
    data = fg.tools.to_bytes(messages.compress(codec, x), codec, x)
    assert data[26:28] == b"\0\0"
    for place in (26, 27):
        with pytest.raises(ValueError, match="zeros"):
            fg.tools.from_bytes(sealed(data[:place] + b"\1" + data[place + 1 :]), codec, x)


@pytest.mark.parametrize(
    ("codec", "like"),
    [
        (fg.TopK(fraction=0.1), VECTOR),
        (fg.chain(fg.TopK(k=10), fg.LogQuantizer(bits=4)), VECTOR),
        (fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=4)), VECTOR),
        (CODECS["top-k 4 bits"], VECTOR.reshape(10, 10)),
        (CODECS["top-k 4 bits"], VECTOR[:99]),
    ],
)
def test_another_codec_or_shape_is_refused(codec, like):
    mine = CODECS["top-k 4 bits"]
    data = fg.tools.to_bytes(messages.compress(mine, VECTOR), mine, VECTOR)
    with pytest.raises(ValueError, match=r"must (have|start with) .* for .*, got"):
        fg.tools.from_bytes(data, codec, like)


def test_mistakes_are_answered_with_the_remedy():
    with pytest.raises(ValueError, match=r"from_bytes\(like\): must not be empty"):
        fg.tools.from_bytes(GOOD, CODEC, np.zeros((0, 3)))
    with pytest.raises(ValueError, match=r"to_bytes\(payload\): must be what"):
        fg.tools.to_bytes(fg.codecs.Payload(jnp.zeros(3)), CODEC, LIKE)
    # Another dtype is no mistake: what is compressed is float32.
    data = fg.tools.to_bytes(
        fg.tools.from_bytes(GOOD, CODEC, LIKE), CODEC, jnp.zeros(60, "bfloat16")
    )
    assert data == GOOD


def test_no_memory_is_taken_before_the_size_is_right():
    large = bytearray(64 << 20)
    large[: len(GOOD)] = GOOD
    for data in (large, memoryview(large)[:-7], GOOD[:12] + b"\xff" * 8 + GOOD[20:]):
        tracemalloc.start()
        with pytest.raises(ValueError, match="must"):
            fg.tools.from_bytes(data, CODEC, LIKE)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 18, peak


words = st.binary(min_size=len(GOOD) - 24, max_size=len(GOOD) - 24)


@given(st.binary(max_size=2 * len(GOOD)) | words.map(lambda body: GOOD[:20] + body + GOOD[-4:]))
def test_bytes_with_a_checksum_are_refused_or_written_alike(data):
    """Anything may be in the words; then it is a payload all the same."""
    data = sealed(data)
    try:
        payload = fg.tools.from_bytes(data, CODEC, LIKE)
    except ValueError as error:
        assert str(error).startswith("from_bytes(data): must ")  # noqa: PT017
    else:
        assert fg.tools.to_bytes(payload, CODEC, LIKE) == data
