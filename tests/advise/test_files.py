"""Arrays in files come back by name, and what is none is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

import fftgrad as fg
from fftgrad.__main__ import main
from fftgrad.advise import _gradient_files

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
    found = fg.advise.load_gradients(file).gradients[0][0]
    assert list(found) == list(TREE)
    for name, x in TREE.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        assert found[name].tobytes() == x.tobytes()


def test_they_are_read_one_after_the_other(file):
    read = _gradient_files.arrays(file)
    assert [name for name, _ in (next(read), next(read))] == list(TREE)[:2]


@pytest.mark.parametrize("kept", [0, 4, 60, -1])
def test_a_file_that_was_cut_off_is_refused(file, kept):
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=r"(?s)^load_gradients\(.*\): must be .* np\.savez"):
        fg.advise.load_gradients(file)


@pytest.mark.parametrize("text", [b"{}", b"[1]", b'{"w": 3}', b'{"w": {"dtype": "F32"}}'])
def test_a_header_of_another_kind_is_refused(tmp_path, text):
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match=r"np\.savez"):
        fg.advise.load_gradients(file)


@pytest.mark.parametrize("ends", [[4, 40], [0, 32], [4, 32]])
def test_tensors_follow_one_another_without_gaps(tmp_path, ends):
    file, body = tmp_path / "x.safetensors", bytes(40)
    header = {"w": {"dtype": "F32", "shape": [(ends[1] - ends[0]) // 4], "data_offsets": ends}}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)
    with pytest.raises(ValueError, match="behind"):
        fg.advise.load_gradients(file)


def test_a_tilde_is_the_home_folder_and_a_url_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    log = fg.advise.GradientLog({0: {0: {"w": np.ones(2, np.float32)}}})
    fg.advise.save_gradients("~/own", log)
    assert [path.name for path in tmp_path.iterdir()] == ["own.npz"]
    assert fg.advise.load_gradients("~/own.npz").gradients.keys() == {0}
    with pytest.raises(ValueError, match=r"save_gradients\(path\): must be a path .*mount"):
        fg.advise.save_gradients("s3://bucket/own", log)
    with pytest.raises(ValueError, match=r"load_gradients\(\*paths\): must be a path .*mount"):
        fg.advise.load_gradients("s3://bucket/own.npz")


def test_a_file_without_a_gradient_is_refused(tmp_path):
    np.savez(tmp_path / "counts.npz", count=np.arange(3), none=np.zeros((0, 3)))
    with pytest.raises(ValueError, match=r"got none; .*np\.savez"):
        fg.advise.load_gradients(tmp_path / "counts.npz")


def test_nothing_in_a_file_is_run(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="got other content"):
        fg.advise.load_gradients(tmp_path / "objects.npy")


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


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_by_its_name_or_read(tmp_path, name):
    file, rng = tmp_path / name, np.random.default_rng(7)
    FORMATS[name](file)
    whole = file.read_bytes()
    refused = []
    for _ in range(DAMAGES):
        file.write_bytes(damaged(whole, rng))
        try:
            fg.advise.load_gradients(file)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 0.4 * DAMAGES
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


def test_gradients_are_saved_in_the_format_that_the_suffix_says(tmp_path):
    log = fg.advise.GradientLog({0: {0: TREE}})
    for name in ("x.safetensors", "x.npy", "step.100"):
        with pytest.raises(ValueError, match=rf"\(path\): must end in .npz.*use '{name}.npz'"):
            fg.advise.save_gradients(tmp_path / name, log)
    fg.advise.save_gradients(tmp_path / "x", log)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=name):
        fg.advise.load_gradients(tmp_path / name)
