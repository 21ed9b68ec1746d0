"""A message filled with the largest coefficients: an oracle of every bit, and what is promised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

import fftgrad as fg
from fftgrad.codecs import _budget
from fftgrad.ops import _exp_golomb

LEVELS = 4096


@functools.partial(jax.jit, static_argnums=0)
def both_ways(codec, x):
    """The payload and what comes back: one program for all tests."""
    payload = fg.compress(codec, x)
    return payload, fg.decompress(codec, payload, x)


def of_bytes(size, n=300):
    return fg.Budget(ratio=4 * n / (size + 0.5))


# The code


def codes(rows, orders):
    """Both halves of the codes of rows of numbers, as lists of bits, first ones first."""
    unary, rest = [], []
    for row in rows:
        for number, order in zip(row, orders, strict=True):
            q = (number >> order) + 1
            e = q.bit_length() - 1
            unary += [0] * e + [1]
            tail = (q - (1 << e)) << order | number & (1 << order) - 1
            rest += [tail >> i & 1 for i in range(e + order)]
    return unary, rest


def words_of(bits):
    value = sum(bit << i for i, bit in enumerate(bits))
    return [value >> 32 * i & 0xFFFFFFFF for i in range(-(-len(bits) // 32))]


def message(rows, orders, size):
    """Unary halves from the first word on, the others from the last one backwards."""
    unary, rest = (words_of(bits) for bits in codes(rows, orders))
    assert len(unary) + len(rest) <= size
    return unary + [0] * (size - len(unary) - len(rest)) + rest[::-1]


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("order", [0, 1, 5, 15])
def test_numbers_are_in_exponential_golomb_codes(order):
    rng = np.random.default_rng(order)
    gaps = (2.0 ** rng.uniform(0, 30, 300)).astype(np.int32) - 1
    gaps[:3] = 0, 1, 2**30
    levels = (2.0 ** rng.uniform(0, 17, 300)).astype(np.int32) - 1
    used = rng.random(300) < 0.8
    orders, encode = (jnp.int32(order), 1), jax.jit(_exp_golomb.encode, static_argnums=3)
    words = encode((gaps, levels), orders, used, 700)
    rows = list(zip(gaps[used].tolist(), levels[used].tolist(), strict=True))
    assert words.tolist() == message(rows, (order, 1), 700)
    decode = jax.jit(_exp_golomb.decode, static_argnums=2)
    found = np.stack(decode(words, orders, 300), axis=1)
    np.testing.assert_array_equal(found[: len(rows)], rows)
    # The second half of the last row's code is in a word behind that where it begins.
    last = (np.int32([0, 2**20]), np.int32([0, 2**15]), np.array([False, True]))
    words = encode(last[:2], orders, last[2], 9)
    assert words.tolist() == message([(2**20, 2**15)], (order, 1), 9)


# The codec


def resolution(fineness):
    """0.5 · 2^(fineness / 32), linear inside an octave."""
    octave, part = divmod(fineness, 32)
    return np.float32(2.0 ** (octave - 1) * (1 + part / 32))


@functools.cache
def oracle(name, size):
    """Step, count and order, codes, and what they stand for, of a real vector.

    Tried level by level from the finest on. A level q stands for 2 q (q + 1) / (2 q + 1) steps,
    between q and q + 1, as far from both in proportion.
    """
    x, words = VECTORS[name], (size - 8) // 4
    most = min(x.size, 32 * words // 6)
    rough = np.abs(x).view(np.int32) >> 15  # exponent and eight bits of the mantissa
    largest = np.sort(np.lexsort((np.arange(x.size), -rough))[:most])
    magnitude = np.abs(x[largest])
    scale = 2.0 ** max(np.floor(np.log2(magnitude.max())), -110)
    magnitude = (magnitude / scale).astype(np.float32)

    def gaps(positions):
        return np.diff(positions, prepend=-1) - 1

    def cost(order):
        sendable = gaps(largest)[magnitude > 0]
        return sum(2 * (((int(g) >> order) + 1).bit_length() - 1) + order for g in sendable)

    order = min(range(16), key=cost)
    for level in range(LEVELS - 1, -1, -1):
        fineness, cut = divmod(level, 8)
        index = np.arange(most)
        ahead = index < -(-most // 8) * cut
        reaches = magnitude * resolution(fineness)
        kept = np.where(ahead, magnitude * resolution(fineness + 1), reaches) >= 1
        q = np.maximum(reaches[kept].astype(np.int64), 1)
        signs = (x[largest[kept]] < 0).astype(np.int64)
        rows = list(zip(gaps(largest[kept]).tolist(), (2 * (q - 1) + signs).tolist(), strict=True))
        unary, rest = (len(bits) for bits in codes(rows, (order, 1)))
        if -(-unary // 32) - (-rest // 32) <= words:
            step, decoded = np.float32(scale / resolution(fineness)), np.zeros(x.size)
            signed = float(step) * np.where(signs, -2, 2)
            decoded[largest[kept]] = signed * q * (q + 1) / (2 * q + 1)
            head = order << 27 | len(rows)
            return step, head, message(rows, (order, 1), words), decoded
    raise AssertionError("at level zero nothing is sent")


VECTORS = {
    "heavy tail": values((300,)),
    "clusters": np.concatenate([0.01 * values((130,)), values((40,), 1), 0.03 * values((130,), 2)]),
    "few": np.where(np.arange(300) == 7, 3e5, 0).astype(np.float32),
    "equal": np.where(np.arange(300) % 7 == 3, -2.0, 0).astype(np.float32),
    "huge": (values((300,)) * 1e36).astype(np.float32),
    "tiny": (values((300,)) * 1e-34).astype(np.float32),
    "tiniest": np.maximum(np.abs(values((300,))) * 1e-37, 1.2e-38).astype(np.float32),
    "close": (1 + 0.01 * np.random.default_rng(0).random(300)).astype(np.float32),
    "near": (1 + 0.5 * np.random.default_rng(1).random(300)).astype(np.float32),
    "late": np.where(np.arange(300) % 10 == 9, values((300,)), 0) * (np.arange(300) > 200),
    "as many as fit": np.concatenate([values((20,)), np.zeros(280, np.float32)]),
}


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("size", [20, 31, 160])
def test_every_bit_is_that_of_the_oracle(size):
    for vector, x in VECTORS.items():
        payload, back = both_ways(of_bytes(size), x)
        step, head, words, decoded = oracle(vector, size)
        assert float(payload.main[0]) == step, vector
        assert int(payload.side.head[0]) == head, vector
        assert payload.side.words.tolist() == words, vector
        np.testing.assert_allclose(back, decoded, rtol=1e-5, err_msg=vector)
        assert np.any(decoded), vector


LONG = values((200_000,)) * np.repeat(values((200,), 1), 1000)
SEARCHED = {
    "layers": LONG,
    "constant": np.where(np.arange(200_000) % 9 == 0, 3.0, 0).astype(np.float32),
    "few": np.where(np.arange(200_000) % 40_000 == 5, LONG, 0).astype(np.float32),
    "two scales": np.where(np.arange(200_000) % 300 == 0, 1e3, 1) * LONG,
    "zeros": np.zeros(200_000, np.float32),
}


@pytest.mark.parametrize("ratio", [10, 300])
def test_both_searches_find_the_finest_level(ratio):
    codec = fg.Budget(ratio=ratio)
    words = codec._words(LONG)

    @jax.jit
    def found(x):
        candidates = _budget.Candidates.of(x, codec._most(x))
        order = _budget.order_of(candidates)
        digits = _budget._by_digits(candidates, order, words)
        growth = _budget._by_growth(candidates, order, words)
        taken = [_budget.Columns.of(candidates).words(order, digits + more) for more in (0, 1)]
        return digits, growth, *taken

    for name, x in SEARCHED.items():
        digits, growth, taken, more = map(int, found(x.astype(np.float32)))
        assert digits == growth, name
        assert taken <= words, name
        assert more > words or digits == LEVELS - 1, name


@jax.jit
def counted(candidates, order, levels):
    """Words of each level: as the search counts them, and one candidate after the other."""

    def plainly(level):
        kept, q = candidates.at(level)
        gaps, count = _budget.gaps_of(candidates.positions, kept), jnp.sum(kept)
        exponents = _exp_golomb.exponents(gaps, order) + _exp_golomb.exponents(q - 1, 0)
        total = jnp.sum(jnp.where(kept, exponents, 0))
        return _exp_golomb.words_for(2 * count, total, (order + 1) * count)

    table = _budget.Columns.of(candidates)
    found = jax.lax.map(lambda level: table.words(order, level), levels)
    return found, jax.lax.map(plainly, levels)


def candidates_at(positions, magnitude):
    positions = positions.astype(np.int32)
    magnitude = np.full(positions.size, magnitude, np.float32)
    return _budget.Candidates(positions, magnitude, np.zeros_like(positions), np.float32(1))


def test_words_are_counted_across_columns_as_one_after_the_other():
    """The candidates fill more than a block, and many are far apart."""
    codec = fg.Budget(ratio=8)
    levels = np.arange(1, LEVELS, 13)

    @jax.jit
    def both(x):
        candidates = _budget.Candidates.of(x, codec._most(x))
        order = _budget.order_of(candidates)
        return *counted(candidates, order, levels), order, candidates.positions

    assert codec._most(LONG) > 2 * max(_budget.COLUMN * _budget.BLOCK, _budget.ORDER_GAPS)
    for name in ("layers", "two scales"):
        x = SEARCHED[name].astype(np.float32)
        x[0] = 2 * np.max(np.abs(x))  # position 0 is sent at each level
        found, wanted, order, positions = both(x)
        np.testing.assert_array_equal(found, wanted, err_msg=name)
        # The order is fitted to a sample of the gaps, and costs little more than the best for all.
        gaps = np.diff(positions, prepend=-1) - 1
        costs = [np.sum(2 * np.floor(np.log2((gaps >> i) + 1)) + i) for i in range(16)]
        assert costs[int(order)] <= 1.01 * min(costs), name


@pytest.mark.parametrize(("rows", "row", "run"), [(4096, 256, 16), (1024, 256, 8), (4200, 512, 9)])
def test_the_order_fits_runs_at_the_start_of_equal_rows(rows, row, run):
    """A sample with a stride as long as a run would see the long gaps alone."""
    positions = (np.arange(rows)[:, None] * row + np.arange(run)).ravel()
    assert int(jax.jit(_budget.order_of)(candidates_at(positions, 1.0))) <= 1


def test_the_longest_codes_are_counted():
    """The exponents of 64 columns are added in the low bits of a word."""
    candidates = candidates_at(np.arange(1 << 10) << 21, 1.99)
    found, wanted = counted(candidates, 0, np.array([LEVELS - 1]))
    assert found == wanted
    assert int(jax.jit(_budget.order_of)(candidates)) == 15


@pytest.mark.parametrize(
    ("ratio", "n", "size"), [(1000, 5, 24), (3.01, 24, 32)], ids=["least", "whole words"]
)
def test_a_ratio_is_never_more_bytes_than_it_says_but_for_the_least(ratio, n, size):
    assert fg.wire_bytes(fg.Budget(ratio=ratio), jnp.zeros(n)) == size


def test_a_step_at_the_end_of_float32_decodes_to_what_that_holds():
    """A level stands for more than its step: for the largest step there is nothing more."""
    most = np.finfo(np.float32).max
    x = (most * np.random.default_rng(0).uniform(-1, 1, 300)).astype(np.float32)
    assert np.abs(both_ways(of_bytes(31), x)[1]).max() == most
