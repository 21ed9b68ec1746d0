"""Shapes of the models that a plan is asked about: named transformers, or one of any size."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fftgrad._contracts import PyTree
from fftgrad._values import check_count

VOCABULARY = 32_000
MODELS: dict[str, tuple[int, int, int]] = {
    "gpt2:124M": (12, 768, 50_257),
    "llama:134M": (12, 768, VOCABULARY),
    "llama:350M": (24, 1024, VOCABULARY),
    "llama:1.3B": (24, 2048, VOCABULARY),
    "llama:7B": (32, 4096, VOCABULARY),
}
"""Layers, width and vocabulary. The sizes of Llama are those of GaLore (arXiv:2403.03507, table 5)
and of Touvron et al. (arXiv:2302.13971)."""
UNIT = 64
"""Widths of a model of a given size are multiples of it."""


def model(name: str) -> PyTree:
    """The shapes of a named model."""
    if name not in MODELS:
        raise ValueError(
            f"plan(--model): must be one of {', '.join(MODELS)}, got {name!r}; use --layers and "
            "--width for another size."
        )
    layers, width, vocabulary = MODELS[name]
    if name.startswith("gpt2"):
        shapes = {"wte": (vocabulary, width), "wpe": (1024, width), "norm": (2 * width,)}
        own = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
        return _shapes(shapes | {"layers": [own | {"down": (4 * width, width)}] * layers})
    return transformer(layers, width, vocabulary)


def transformer(layers: int, width: int, vocabulary: int = VOCABULARY) -> PyTree:
    """The shapes of a Llama: 12 width^2 values a layer, an embedding and a head of its size."""
    check_count("plan(--layers)", layers, "use --layers 24.")
    check_count("plan(--width)", width, "use --width 2048.")
    check_count("plan(--vocab)", vocabulary, "use --vocab 32000.")
    embeddings = {"embed": (vocabulary, width), "lm_head": (width, vocabulary)}
    return _shapes({**embeddings, "layers": [_layer(width)] * layers, "norm": (width,)})


def of_size(parameters: int) -> PyTree:
    """The shapes of a transformer of exactly so many parameters.

    It has a layer for each 80 of its width, which is about that of published models. An embedding
    and a vector hold the rest.
    """
    width = UNIT * max(1, round((80 * parameters / 12) ** (1 / 3) / UNIT))
    layer = _layer(width)
    each = sum(map(math.prod, layer.values()))
    layers, rest = divmod(parameters, each)
    rows, rest = divmod(rest, width)
    shapes: dict[str, Any] = {"layers": [layer] * layers}
    shapes |= {"embed": (rows, width)} if rows else {}
    return _shapes(shapes | ({"rest": (rest,)} if rest else {}))


def _layer(width: int) -> dict[str, tuple[int, ...]]:
    hidden = 8 * width // 3
    attention = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    return attention | {
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
        "attention_norm": (width,),
        "mlp_norm": (width,),
    }


def _shapes(tree: Any) -> PyTree:
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=is_shape)
