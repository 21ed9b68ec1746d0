"""Arrays in files come back by name, and what is none is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

import fftgrad as fg
from fftgrad.__main__ import main
from fftgrad.advise.commands import _files

TREE = {
    "layer/w": values((10, 11)),
    "layer/b": values((7,), 1).astype(jnp.bfloat16),
    "scale": values((), 2).astype(np.float16),
}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64"}


def safetensors(path, tree):
    """The format by its description: a length, a header of JSON, and bytes."""
    header, body = {"__metadata__": {"format": "np"}}, b""
    for name, x in tree.items():
        ends = [len(body), len(body) + x.nbytes]
        header[name] = {"dtype": DTYPES[x.dtype.name], "shape": x.shape, "data_offsets": ends}
        body += x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def npz(path, tree):
    np.savez(path, **tree)


@pytest.fixture(params=[npz, safetensors], ids=lambda save: save.__name__)
def file(request, tmp_path):
    path = tmp_path / f"tree.{request.param.__name__}"
    request.param(path, {"count": np.arange(5)} | TREE)
    return path


def test_floating_point_arrays_come_back_by_name(file):
    found = _files.arrays("plan(--gradients)", file)
    assert list(found) == list(TREE)
    for name, x in TREE.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        assert found[name].tobytes() == x.tobytes()


def test_shapes_are_those_of_the_arrays(file):
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in TREE.items()}
    assert _files.shapes("plan(--params)", file) == like


def test_one_array_has_the_name_of_its_file_and_is_no_float64(tmp_path):
    np.save(tmp_path / "gradient.npy", values((9,)).astype(np.float64))
    found = _files.arrays("bench(--gradients)", tmp_path / "gradient.npy")
    assert {name: x.dtype for name, x in found.items()} == {"gradient": np.float32}
    np.testing.assert_array_equal(found["gradient"], values((9,)))


@pytest.mark.parametrize(
    ("read", "kept"),
    [
        *((_files.arrays, kept) for kept in (0, 4, 60, -1)),
        *((_files.shapes, kept) for kept in (0, 4, 60)),  # they are in the header
    ],
)
def test_a_file_that_was_cut_off_is_refused(file, read, kept):
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=r"(?s)^plan\(--params\): must be .* np\.savez"):
        read("plan(--params)", file)


@pytest.mark.parametrize("text", [b"{}", b"[1]", b'{"w": 3}', b'{"w": {"dtype": "F32"}}'])
def test_a_header_of_another_kind_is_refused(tmp_path, text):
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match=r"np\.savez"):
        _files.arrays("plan(--params)", file)


def test_nothing_in_a_file_is_run(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be read"):
        _files.arrays("plan(--params)", tmp_path / "objects.npy")


DAMAGES = 150


def damaged(whole, rng):
    """Cut off, or with bits flipped, half of them in the first bytes, which are the header."""
    bad = bytearray(whole)
    if rng.random() < 1 / 3:
        return bytes(bad[: rng.integers(0, len(bad))])
    for _ in range(rng.choice([1, 8])):
        end = len(bad) if rng.random() < 0.5 else min(200, len(bad))
        bad[rng.integers(0, end)] ^= 1 << rng.integers(0, 8)
    return bytes(bad)


FORMATS = {
    "plain.npz": lambda path: np.savez(path, **TREE),
    "small.npz": lambda path: np.savez_compressed(path, **TREE),
    "one.npy": lambda path: np.save(path, TREE["layer/w"]),
    "other.safetensors": lambda path: safetensors(path, TREE),
}
READ = {
    "load": fg.advise.load_gradients,
    "gradients": lambda path: _files.gradients("plan(--gradients)", path),
    "arrays": lambda path: _files.arrays("plan(--params)", path),
    "shapes": lambda path: _files.shapes("plan(--params)", path),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_by_its_name_or_read(tmp_path, name):
    file, rng = tmp_path / name, np.random.default_rng(7)
    FORMATS[name](file)
    whole = file.read_bytes()
    refused = []
    for _ in range(DAMAGES):
        file.write_bytes(damaged(whole, rng))
        for read in READ.values():
            try:
                read(file)
            except ValueError as error:
                refused.append(str(error))
    assert len(refused) > 0.4 * DAMAGES * len(READ)
    assert all(str(file) in text and "; " in text for text in refused)


def other_blocks(raw):
    """Of a kind that zlib does not know, behind the header of the first file of a zip."""
    start = 30 + int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")
    return raw[:start] + b"\xff" + raw[start + 1 :]


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("small.npz", other_blocks),  # zlib.error
        ("small.npz", lambda raw: raw.replace(b"PK\x01\x02", b"PK\x01\x02\xff\xff", 1)),
        ("one.npy", lambda raw: raw.replace(b"}", b" ")),  # tokenize.TokenError
    ],
)
def test_the_command_line_names_a_damaged_file(tmp_path, capsys, name, spoil):
    file = tmp_path / name
    FORMATS[name](file)
    file.write_bytes(spoil(file.read_bytes()))
    assert main(["analyze", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=name):
        fg.advise.load_gradients(tmp_path / name)
