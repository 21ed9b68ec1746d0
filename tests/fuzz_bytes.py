"""Feeds `from_bytes` what a coverage-guided fuzzer makes up.

`python tests/fuzz_bytes.py FOLDER -max_total_time=60`, after `pip install -e ".[fuzz]"`; in the
folder it keeps what reached a new branch.
"""

import inspect
import pathlib
import struct
import sys
import zlib

import jax
from cases import CODECS, values
from messages import compress

import fftgrad as fg

CODEC = CODECS["blocked 4 bits"]
LIKE = jax.ShapeDtypeStruct((60,), "float32")


def good(codec: fg.codecs.Codec, seed: int = 7) -> bytes:
    """The bytes of a payload."""
    return fg.tools.to_bytes(compress(codec, values((60,), seed)), codec, LIKE)


def check(data: bytes, known: set[bytes] | None) -> None:
    """The bytes are refused, or a payload that is written alike; of `known` ones if given."""
    try:
        payload = fg.tools.from_bytes(data, CODEC, LIKE)
    except ValueError as error:
        if not str(error).startswith("from_bytes(data): must ") or data in (known or ()):
            raise AssertionError from error
    else:
        assert fg.tools.to_bytes(payload, CODEC, LIKE) == data
        assert known is None or data in known


def main(corpus: pathlib.Path) -> None:
    """Starts from two good payloads."""
    import atheris

    from fftgrad.tools import _bytes

    for name, value in list(vars(_bytes).items()):
        if inspect.isfunction(value) and value.__module__ == _bytes.__name__:
            setattr(_bytes, name, atheris.instrument_func(value))
    fg.tools.from_bytes, fg.tools.to_bytes = _bytes.from_bytes, _bytes.to_bytes

    def one(data: bytes) -> None:
        """Half of the inputs get the checksum that belongs to them, or hardly any would pass."""
        body = data[1:]
        if data[:1] > b"\x80":
            body = body[:-4] + struct.pack("<I", zlib.crc32(body[:-4]))
        check(body, None)

    for seed, kind in enumerate((b"\0", b"\xff")):
        (corpus / f"good {seed}").write_bytes(kind + good(CODEC, seed))
    atheris.Setup([*sys.argv, "-max_len=512"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(pathlib.Path(sys.argv[1]))
