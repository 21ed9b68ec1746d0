"""SparseLoCo's compression as its authors' network runs it."""

import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from others._both import Row, apart, both_ways, imported, pmean, run

import fftgrad as fg

REPOSITORY = "tplr-ai/templar"
LICENSE = "MIT"
SHAPES = ((256, 192), (64, 128))
BLOCK, KEPT, WORKERS = 64, 64, 3


def codec(shape: tuple[int, int], bits: int | None) -> fg.codecs.Codec:
    """What `sparse_loco` makes of a matrix."""
    tiles = fg.codecs.Tiles(BLOCK, shape=shape)
    sparse = fg.chain(tiles, fg.ChunkTopK(tiles.tile_size, KEPT))
    return sparse if bits is None else fg.chain(sparse, fg.codecs.BinMeans(bits))


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for the choice, the two bits, and the mean that is cut to the median's length."""
    import torch

    sys.modules["tplr"] = types.ModuleType("tplr")  # its own is the whole network
    module = imported(checkout / "src/tplr", "compress")
    for shape in SHAPES[: 1 if smoke else None]:
        model = torch.nn.Linear(shape[1], shape[0], bias=False)
        tiles = module.ChunkingTransformer(model, BLOCK)
        like = torch.zeros(shape)
        words = f"{shape[0]} × {shape[1]} normal values, {KEPT} of a tile of side {BLOCK}"
        x = np.random.default_rng(2).standard_normal(shape, np.float32)

        plain = module.TopKCompressor(use_quantization=False)
        sent = plain.compress(tiles.encode(torch.from_numpy(x)), KEPT)
        expected = tiles.decode(plain.decompress(like, *sent)).numpy()
        exact = codec(shape, None)
        found = both_ways(exact, x)
        yield Row(
            "`ChunkingTransformer`, `TopKCompressor`",
            "`Tiles`, `ChunkTopK`",
            words,
            apart(found, expected),
        )

        coarse: Any = module.TopKCompressor(
            use_quantization=True, quantization_bins=4, quantization_range=6
        )
        sent = coarse.compress(tiles.encode(torch.from_numpy(x)), KEPT)
        expected = tiles.decode(coarse.decompress(like, *sent)).numpy()
        found = both_ways(codec(shape, 2), x)
        others = int(np.sum(np.abs(found - expected) > 1e-2 * np.abs(expected).max()))
        yield Row(
            "the same in 4 bins, values in another bin",
            "`BinMeans(2)`",
            words,
            others,
            f"of {np.count_nonzero(expected)} values",
            None,
            "σ divides by n - 1 there, by n here",
        )
        if not others:
            yield Row("the values", "the same", words, apart(found, expected))

        scales = np.array([1.0, 3.0, 0.5], np.float32)  # so that all send the same positions
        rows = scales[:, None, None] * x
        messages = [plain.compress(tiles.encode(torch.from_numpy(row)), KEPT) for row in rows]
        expected = tiles.decode(
            plain.batch_decompress(
                like,
                [message[0] for message in messages],
                [message[1] for message in messages],
                *messages[0][2:],
                clip_norm=True,
            )
        ).numpy()
        tx = pmean(fg.AllGather(exact, clip_to_median=True), bucketing=fg.Bucketing("leaf"))
        updates, _ = run(tx, rows[None])
        yield Row(
            "`batch_decompress(clip_norm=True)`",
            "`clip_to_median`",
            f"{words}, {WORKERS} workers with the same positions",
            apart(updates[0], expected),
            differs="the mean is over who sent a value there, over all here: all sent the same",
        )
