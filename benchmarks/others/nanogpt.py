"""nanoGPT's character model at the settings that its README has for a CPU, and the loss it names.

The checkout has in `data/shakespeare_char/input.txt` the text that `prepare.py` there downloads.
"""

# PyTorch is no dependency of the project.
# pyright: reportMissingImports=false

import functools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from others._compare import AXIS, Row, imported

import fftgrad as fg

REPOSITORY = "karpathy/nanoGPT"
LICENSE = "MIT"
TEXT = "data/shakespeare_char/input.txt"
WORKERS, BATCH, CONTEXT, LAYERS, HEADS, WIDTH = 4, 12, 64, 4, 4, 128
STEPS, WARM, PEAK, LEAST, DECAY, CLIP = 2000, 100, 1e-3, 1e-4, 0.1, 1.0
Params = dict[str, Any]
INPUTS = f"12 passages of 64 characters by {WORKERS} workers, their learning rate"


class Twin(nn.Module):
    """Their `GPT` without biases and dropout, whose output layer is its embedding."""

    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int[B, T] -> float32[B, T, vocabulary]."""
        embed = nn.Embed(self.vocabulary, WIDTH, name="wte")
        x = embed(tokens) + nn.Embed(CONTEXT, WIDTH, name="wpe")(jnp.arange(tokens.shape[1])[None])
        normal = functools.partial(nn.LayerNorm, epsilon=1e-5, use_bias=False)
        dense = functools.partial(nn.Dense, use_bias=False)
        for i in range(LAYERS):
            y = dense(3 * WIDTH, name=f"h.{i}.attn.c_attn")(normal(name=f"h.{i}.ln_1")(x))
            parts = (part.reshape(*y.shape[:2], HEADS, -1) for part in jnp.split(y, 3, -1))
            y = jax.nn.dot_product_attention(*parts, is_causal=True).reshape(x.shape)
            x = x + dense(WIDTH, name=f"h.{i}.attn.c_proj")(y)
            y = dense(4 * WIDTH, name=f"h.{i}.mlp.c_fc")(normal(name=f"h.{i}.ln_2")(x))
            x = x + dense(WIDTH, name=f"h.{i}.mlp.c_proj")(nn.gelu(y, approximate=False))
        return embed.attend(normal(name="ln_f")(x))


def carried(model: Any) -> Params:
    """Their parameters, by the names of ours."""
    found: Params = {}
    for name, value in model.transformer.named_parameters():
        module, _, _ = name.removeprefix("transformer.").rpartition(".")
        array = jnp.array(value.detach().numpy())
        if module in ("wte", "wpe"):
            found[module] = {"embedding": array}
        else:
            found[module] = {"scale": array} if array.ndim == 1 else {"kernel": array.T}
    return {"params": found}


def texts(checkout: pathlib.Path) -> tuple[np.ndarray, np.ndarray, int]:
    """What is trained on, what is assessed on, and how many characters there are."""
    text = (checkout / TEXT).read_text()
    codes = {c: i for i, c in enumerate(sorted(set(text)))}
    all_of_it = np.array([codes[c] for c in text], np.int32)
    cut = int(0.9 * len(text))
    return all_of_it[:cut], all_of_it[cut:], len(codes)


def passages(rng: np.random.Generator, text: np.ndarray, count: int) -> np.ndarray:
    """int32[count, CONTEXT + 1], drawn as theirs are."""
    starts = rng.integers(len(text) - CONTEXT, size=count)
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


def rate(count: Any) -> Any:
    """Theirs: a rise, then half a cosine down to a tenth."""
    rise = PEAK * (count + 1) / (WARM + 1)
    share = jnp.clip((count - WARM) / (STEPS - WARM), 0, 1)
    fall = LEAST + 0.5 * (1 + jnp.cos(jnp.pi * share)) * (PEAK - LEAST)
    return jnp.where(count < WARM, rise, fall)


def matrices(params: Params) -> Any:
    """Where they decay: what is no vector."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def optimizers() -> dict[str, optax.GradientTransformationExtraArgs]:
    """The row of each. What is clipped is the mean where it is dense, else each worker's own."""
    decay: Any = {"weight_decay": DECAY, "mask": matrices}

    def dense(inner: Any) -> optax.GradientTransformationExtraArgs:
        mean = fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS)
        return optax.chain(mean, optax.clip_by_global_norm(CLIP), inner)

    plain = optax.contrib.muon(
        rate, consistent_rms=0.2, adam_b2=0.99, weight_decay=DECAY, weight_decay_mask=matrices
    )
    local: Any = fg.training.clip_by_local_norm(CLIP)
    thirty, hundred = (fg.AllGather(fg.Budget(ratio=ratio)) for ratio in (30, 100))
    adam, muon = fg.optimizers.feedback_adam, fg.optimizers.feedback_muon
    return {
        "dense AdamW": dense(optax.adamw(rate, b2=0.99, **decay)),
        "dense Muon": dense(plain),
        "30 times fewer bytes, `feedback_adam(nu=0.7)`": optax.chain(
            local, adam(rate, thirty, nu=0.7, axis_name=AXIS, **decay)
        ),
        "30 times fewer bytes, `feedback_muon(lead=0.3)`": optax.chain(
            local, muon(rate, thirty, lead=0.3, axis_name=AXIS, **decay)
        ),
        "100 times fewer bytes, `feedback_muon(lead=0.5)`": optax.chain(
            local, muon(rate, hundred, lead=0.5, axis_name=AXIS, **decay)
        ),
    }


Loss = Callable[[Params, Any], Any]


def ended(loss: Loss, start: Params, tx: Any, train: np.ndarray, steps: int) -> Params:
    """The parameters after so many steps."""
    specs = fg.state_specs(jax.eval_shape(tx.init, start), AXIS)
    axes = jax.tree.map(lambda spec: 0 if spec else None, specs)

    def step(params: Params, state: Any, tokens: Any) -> Any:
        moves, state = tx.update(jax.grad(loss)(params, tokens), state, params)
        return optax.apply_updates(params, moves), state

    whole = jax.vmap(
        step, in_axes=(None, axes, 0), out_axes=(None, axes), axis_name=AXIS, axis_size=WORKERS
    )
    run = jax.jit(whole, donate_argnums=1)
    state = jax.tree.map(
        lambda leaf, spec: jnp.stack([leaf] * WORKERS) if spec else leaf, tx.init(start), specs
    )
    params, rng = start, np.random.default_rng(1337)
    for _ in range(steps):
        tokens = passages(rng, train, BATCH).reshape(WORKERS, -1, CONTEXT + 1)
        params, state = run(params, state, tokens)
    return params


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for one batch by both models, and for the losses of whole runs."""
    import torch

    theirs = imported(checkout, "model")
    train, test, vocabulary = texts(checkout)
    torch.manual_seed(1337)
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": CONTEXT}
    model = theirs.GPT(theirs.GPTConfig(**sizes, vocab_size=vocabulary, bias=False))
    start, twin = carried(model), Twin(vocabulary)

    def loss(params: Params, tokens: Any) -> Any:
        logits: Any = twin.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tested = jax.jit(loss)
    batch = passages(np.random.default_rng(0), test, 200)
    tokens = torch.tensor(batch, dtype=torch.long)
    _, their_loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())
    found, own = their_loss.item(), float(tested(start, batch))
    yield Row(
        "`GPT`, the loss before training",
        "a twin in Flax",
        "4 layers of width 128, 200 passages of 64 characters",
        abs(own - found) / found,
    )
    (named,) = re.findall(r"gets us a loss of only (\d\.\d+)", (checkout / "README.md").read_text())
    rng = np.random.default_rng(2)
    batches = [passages(rng, test, 100) for _ in range(2 if smoke else 40)]
    steps = 3 if smoke else STEPS
    for words, tx in optimizers().items():
        last = ended(loss, start, tx, train, steps)
        own = float(np.mean([float(tested(last, batch)) for batch in batches]))
        same = words == "dense AdamW"
        yield Row(
            f"{named}, as the README has it",
            f"{own:.3f}: {words}",
            f"{steps:,} steps of {INPUTS}",
            abs(own / float(named) - 1),
            limit=0.02 if same and not smoke else None,
            differs="draws of their own" if same else "another optimizer, at AdamW's rate",
        )
