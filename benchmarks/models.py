"""The parameters of models that others train, by their names and shapes."""

import math
from collections.abc import Callable
from typing import Any

from _record import markdown

Shapes = dict[str, tuple[int, ...]]


def gpt2() -> Shapes:
    """GPT-2 with 124 million parameters (12 layers)."""
    d = 768
    return _gpt(d, 12, 1024, {"c_attn": (d, 3 * d), "c_proj": (d, d)}, biases=("c_attn", "c_proj"))


def gpt_neo() -> Shapes:
    """GPT-Neo with 1.3 billion parameters (24 layers)."""
    d = 2048
    heads = {f"{name}_proj": (d, d) for name in ("q", "k", "v", "out")}
    return _gpt(d, 24, 2048, heads, biases=("out_proj",))


def llama3() -> Shapes:
    """Llama 3 with 8 billion parameters (32 layers)."""
    d, of_keys, hidden, words = 4096, 1024, 14336, 128256
    block = {
        "attention_norm": (d,),
        "attention/wq": (d, d),
        "attention/wk": (d, of_keys),
        "attention/wv": (d, of_keys),
        "attention/wo": (d, d),
        "ffn_norm": (d,),
        "feed_forward/w1": (d, hidden),
        "feed_forward/w2": (hidden, d),
        "feed_forward/w3": (d, hidden),
    }
    first = {"tok_embeddings": (words, d)}
    return first | _layers("layers", 32, block) | {"norm": (d,), "output": (d, words)}


MODELS: dict[str, Callable[[], Shapes]] = {"124M": gpt2, "1.3B": gpt_neo, "8B": llama3}


def count(shapes: Shapes) -> int:
    """How many values they have."""
    return sum(map(math.prod, shapes.values()))


def show(record: dict[str, Any]) -> str:
    """The table of what compiling their updates gave: a line for each model, mesh and row."""
    columns = (
        "model",
        "mesh",
        "row",
        "compile s",
        "kernels",
        "collectives",
        "temporaries",
        "state",
    )
    cells = [
        [
            r["model"],
            f"{r['workers']}" if r["pieces"] == 1 else f"{r['workers']} × {r['pieces']}",
            r["row"],
            f"{r['trace_s'] + r['compile_s']:.0f}",
            str(r["kernels"]),
            str(r["collectives"]),
            f"{r['temporaries']:.1f}",
            f"{r['state']:.1f}",
        ]
        for r in record["rows"]
    ]
    return markdown(columns, cells)


def _gpt(d: int, layers: int, words: int, attention: Shapes, biases: tuple[str, ...]) -> Shapes:
    """What these have in common, around an attention, for texts of so many words."""
    block = _norm("ln_1", d)
    for name, shape in attention.items():
        block[f"attn/{name}/kernel"] = shape
        if name in biases:
            block[f"attn/{name}/bias"] = shape[1:]
    block |= _norm("ln_2", d)
    for name, shape in {"c_fc": (d, 4 * d), "c_proj": (4 * d, d)}.items():
        block |= {f"mlp/{name}/kernel": shape, f"mlp/{name}/bias": shape[1:]}
    first = {"wte/embedding": (50257, d), "wpe/embedding": (words, d)}
    return first | _layers("h", layers, block) | _norm("ln_f", d)


def _norm(name: str, d: int) -> Shapes:
    return {f"{name}/scale": (d,), f"{name}/bias": (d,)}


def _layers(name: str, layers: int, block: Shapes) -> Shapes:
    return {f"{name}/{i}/{leaf}": shape for i in range(layers) for leaf, shape in block.items()}
