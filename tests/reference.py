"""NumPy oracles, in float64 and Python integers, written from the definitions."""

import math

import numpy as np


def smooth_even(n: int) -> int:
    """The least even m >= max(n, 2) that 2, 3, 5 and 7 divide down to 1."""
    m = max(2, n)
    while True:
        rest = m
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1 and m % 2 == 0:
            return m
        m += 1


def block_of(n: int, block: int | None) -> int:
    if block is None:
        return smooth_even(n)
    least = 2
    while least < n:
        least *= 2
    return min(block, least)


def fft(x, block: int | None, half: bool = False):
    """z_0 = c_0 + i c_{b/2}, z_j = sqrt(2) c_j, by the definition of the transform."""
    x = np.asarray(x, np.float32)
    if half:
        x = np.clip(x, -65504, 65504).astype(np.float16)
    x = x.astype(np.float64)
    b = block_of(x.size, block)
    rows = np.pad(x, (0, -x.size % b)).reshape(-1, b)
    c = np.fft.rfft(rows, norm="ortho")
    z = np.sqrt(2) * c[:, : b // 2]
    z[:, 0] = c[:, 0].real + 1j * c[:, b // 2].real
    return z.ravel()


def inverse_fft(z, n: int, block: int | None):
    b = block_of(n, block)
    z = z.reshape(-1, b // 2)
    c = np.zeros((z.shape[0], b // 2 + 1), np.complex128)
    c[:, 1:-1] = z[:, 1:] / np.sqrt(2)
    c[:, 0], c[:, -1] = z[:, 0].real, z[:, 0].imag
    return np.fft.irfft(c, b, norm="ortho").ravel()[:n]


def dct(x, block: int):
    """sum_t x_t cos(pi (2t + 1) j / 2b), scaled to be orthonormal, of each block."""
    x = np.asarray(x, np.float64)
    b = block_of(x.size, block)
    rows = np.pad(x, (0, -x.size % b)).reshape(-1, b)
    out = np.zeros_like(rows)
    for j in range(b):
        wave = [math.cos(math.pi * (2 * t + 1) * j / (2 * b)) for t in range(b)]
        out[:, j] = math.sqrt((1 if j == 0 else 2) / b) * rows @ wave
    return out.ravel()


def hadamard(x, block: int):
    """By butterflies of sums and differences."""
    x = np.asarray(x, np.float64)
    b = block_of(x.size, block)
    rows = np.pad(x, (0, -x.size % b)).reshape(-1, b)
    h = 1
    while h < b:
        pairs = rows.reshape(rows.shape[0], -1, 2, h)
        rows = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        rows = rows.reshape(pairs.shape[0], b)
        h *= 2
    return rows.ravel() / math.sqrt(b)


def top_k(x, k: int):
    """Positions of the k largest magnitudes, lowest first among equals, ascending."""
    magnitude = np.abs(np.asarray(x)).astype(np.float64)
    magnitude = np.where(np.isnan(magnitude), np.inf, magnitude)
    return np.sort(np.argsort(-magnitude, kind="stable")[:k])


def largest(x, k: int):
    """The k largest magnitudes where they are, and zeros."""
    out, chosen = np.zeros(np.size(x)), top_k(x, k)
    out[chosen] = np.asarray(x)[chosen]
    return out


def votes(x, k: int):
    """The signs of the k largest magnitudes, and zeros."""
    return np.sign(largest(x, k))


def kept(fraction: float, n: int) -> int:
    return max(1, math.ceil(round(fraction * n, 6)))


def stream(codes, bits: int) -> list[int]:
    """Words of the bit stream, by one long integer."""
    whole = 0
    for j, code in enumerate(codes):
        whole |= int(code) << (j * bits)
    return [(whole >> (32 * w)) & 0xFFFFFFFF for w in range(-(-len(codes) * bits // 32))]


def float_of(count: int, m: int) -> float:
    """The value whose float32 bits begin with `count`, m of its mantissa bits."""
    exponent, mantissa = divmod(count, 1 << m)
    return math.ldexp(1 + mantissa / (1 << m), exponent - 127)


def count_of(value: float, m: int) -> int:
    """How the paper numbers values: the top bits of the float32."""
    return int(np.float32(value).view(np.int32)) >> (23 - m)


def representable(base: int, how_many: int, m: int):
    return np.array([float_of(base + j, m) for j in range(how_many)])


def range_float(x, m: int, base: int, each_side: int):
    """Nearest representable value, searched for among all of them."""
    grid = representable(base, each_side, m)
    grid = np.concatenate([[0.0], grid])
    magnitude = np.abs(np.asarray(x, np.float64))
    nearest = np.abs(magnitude[:, None] - grid[None, :]).argmin(1)
    return np.where(np.asarray(x) < 0, -1, 1) * grid[nearest]


def paper_tuning(minimum: float, maximum: float, bits: int, m: int, start: float = 0.002):
    """The paper's loop over eps, a step of one representable value at a time: (eps, P)."""
    count = count_of(start, m)
    for _ in range(100_000):
        positive = count_of(maximum, m) - count + 1
        negatives = 2**bits - 1 - positive
        actual_minimum = -float_of(count + negatives - 1, m)
        if abs(count_of(-actual_minimum, m) - count_of(-minimum, m)) <= 1:
            return float_of(count, m), positive
        count += -1 if actual_minimum < minimum else 1
    raise AssertionError("the paper's loop did not end")


def paper_encode(x: float, m: int, eps: float, maximum: float) -> int:
    """Algorithm 1 of the paper, for a positive value."""
    return count_of(min(x, maximum), m) - count_of(eps, m) + 1


def paper_decode(code: int, m: int, eps: float) -> float:
    return float_of(code + count_of(eps, m) - 1, m)
