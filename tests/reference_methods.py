"""The published methods in NumPy, step by step, from their papers' equations.

An oracle is a function of a step: one dict of float64 arrays per worker in, the update out. Random
bits come from the library's own generator, which has tests of its own.
"""

import abc
import functools
import itertools
import math

import jax
import numpy as np
import reference

from fftgrad.ops import _random

# Randomness


@functools.partial(jax.jit, static_argnums=2)
def keys(step: int, worker: int, part: int = 0):
    """The shared and the local key of a part, as compressed_pmean(key=0) derives them."""
    shared, local = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
    local = jax.random.fold_in(local, worker)
    shared, local = jax.random.fold_in(shared, 0), jax.random.fold_in(local, 0)
    if part:
        shared, local = jax.random.fold_in(shared, part), jax.random.fold_in(local, part)
    return shared, local


keyed_bits = jax.jit(_random.keyed_bits, static_argnums=1)


def uniform(key, count: int):
    return (np.asarray(keyed_bits(key, count)) >> 8) * 2.0**-24


# Trees


def flat(tree):
    return np.concatenate([np.ravel(tree[name]) for name in sorted(tree)])


def unflat(vector, like):
    out, start = {}, 0
    for name in sorted(like):
        out[name] = vector[start : start + like[name].size].reshape(like[name].shape)
        start += like[name].size
    return out


def zeros(tree):
    return {name: np.zeros(np.shape(leaf)) for name, leaf in tree.items()}


def mean(trees):
    return {name: np.mean([tree[name] for tree in trees], axis=0) for name in trees[0]}


def keep(x, positions):
    return np.where(np.isin(np.arange(x.size), positions).reshape(x.shape), x, 0.0)


class Oracle:
    """State by worker, made at the first step."""

    def __init__(self):
        self.t = 0
        self.state = None

    def start(self, grads):
        """The state before the first step."""
        return [zeros(g) for g in grads]

    def __call__(self, grads):
        if self.state is None:
            self.state = self.start(grads)
        out = self.step(grads)
        self.t += 1
        return out


class Feedback(Oracle):
    """The mean of what each worker sends of a leaf, or of all leaves as one vector.

    The rest is the residual; with a decay of 0 there is none.
    """

    decay, together = 1.0, False

    def parts(self, grads):
        return [{"all": flat(g)} if self.together else g for g in grads]

    def start(self, grads):
        return super().start(self.parts(grads))

    def average(self, grads):
        sent = []
        for worker, (left, grad) in enumerate(zip(self.state, self.parts(grads), strict=True)):
            sent.append({})
            for name, g in grad.items():
                a = self.decay * left[name] + g
                self.worker, self.grad = worker, g
                sent[-1][name] = self.compress(a)
                left[name] = a - sent[-1][name]
        return unflat(mean(sent)["all"], grads[0]) if self.together else mean(sent)

    step = average


class TopK(Feedback):
    def __init__(self, fraction):
        super().__init__()
        self.fraction = fraction

    def compress(self, a):
        return keep(a, reference.top_k(a.ravel(), reference.kept(self.fraction, a.size)))


class FeedbackAdam(TopK):
    """Top-k of all leaves together, feedback, and QHAdam (arXiv:1810.06801)."""

    together = True

    def __init__(self, learning_rate, fraction, lead, b1=0.9, b2=0.99, eps=1e-8):
        super().__init__(fraction)
        self.rate, self.lead, self.averages = learning_rate, lead, {}
        self.b1, self.b2, self.eps = b1, b2, eps

    def average_of(self, kind, decay, tree):
        """A moving average, corrected for its start."""
        old = self.averages.setdefault(kind, zeros(tree))
        for name, leaf in tree.items():
            old[name] = decay * old[name] + (1 - decay) * leaf
        return {name: leaf / (1 - decay ** (self.t + 1)) for name, leaf in old.items()}

    def step(self, grads):
        g = self.average(grads)
        first = self.average_of("first", self.b1, g)
        square = self.average_of("square", self.b2, {name: leaf**2 for name, leaf in g.items()})
        root = {name: np.sqrt(leaf) + self.eps for name, leaf in square.items()}
        return self.moves(g, first, root)

    def moves(self, g, first, root):
        led = {name: self.lead * g[name] + (1 - self.lead) * first[name] for name in g}
        return {name: -self.rate * led[name] / root[name] for name in g}


class FeedbackMuon(FeedbackAdam):
    """Five steps of Newton-Schulz on an average of 0.95, Adam for what is no matrix; a lead."""

    def moves(self, g, first, root):
        slow, moves = self.average_of("slow", 0.95, g), {}
        for name, leaf in g.items():
            move = self.orthogonal(slow[name]) if leaf.ndim == 2 else first[name] / root[name]
            moves[name] = -self.rate * (move + self.lead * leaf / root[name])
        return moves

    @staticmethod
    def orthogonal(x):
        scale, x = 0.2 * np.sqrt(max(x.shape)), x / (np.linalg.norm(x) + 1e-8)
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return scale * x


class RandomK(TopK):
    together = True

    def compress(self, a):
        k = reference.kept(self.fraction, a.size)
        edges = [i * (a.size // k) + min(i, a.size % k) for i in range(k + 1)]
        bits = np.asarray(keyed_bits(keys(self.t, 0)[0], k)).tolist()
        bins = zip(itertools.pairwise(edges), bits, strict=True)
        return keep(a, [low + b % (high - low) for (low, high), b in bins])


class Qsgd(Feedback):
    decay, together = 0.0, True

    def __init__(self, bits, bucket):
        super().__init__()
        self.s, self.bucket = 2 ** (bits - 1) - 1, bucket

    def compress(self, v):
        padded = np.pad(v, (0, -v.size % self.bucket)).reshape(-1, self.bucket)
        noise = uniform(keys(self.t, self.worker)[1], padded.size).reshape(padded.shape)
        norm = np.linalg.norm(padded, axis=1, keepdims=True)
        level = self.s * np.abs(padded) / norm
        # The chance to round away from zero is the fraction, whichever side it is rounded on.
        up = np.where(padded < 0, noise >= 1 - (level % 1), noise < level % 1)
        q = norm * np.sign(padded) * (np.floor(level) + up) / self.s
        return q.ravel()[: v.size]


class TernGrad(Oracle):
    """Documented difference: σ is the deviation from zero. What is drawn is the library's."""

    def __init__(self, clip, dense=(), shared=False):
        super().__init__()
        self.clip, self.dense, self.shared = clip, dense, shared

    def step(self, grads):
        out = {}
        for part, name in enumerate(sorted(grads[0])):
            if any(word in name for word in self.dense):
                out[name] = np.mean([g[name] for g in grads], axis=0)
                continue
            clipped = []
            for grad in grads:
                bound = self.clip * np.sqrt(np.mean(np.square(grad[name]))) or np.inf
                clipped.append(np.clip(grad[name], -bound, bound))
            scales = [np.abs(c).max() for c in clipped]
            if self.shared:
                scales = [max(scales)] * len(scales)
            sent = []
            for worker, (c, s) in enumerate(zip(clipped, scales, strict=True)):
                noise = uniform(keys(self.t, worker, part)[1], c.size).reshape(c.shape)
                chance = np.abs(c) / s
                b = np.where(c < 0, noise >= 1 - chance, noise < chance)
                sent.append(s * np.sign(c) * b)
            out[name] = np.mean(sent, axis=0)
        return out


class SignSgd(Feedback):
    def compress(self, a):
        return np.abs(a).sum() / a.size * np.sign(a)


class MajorityVote(Oracle):
    def step(self, grads):
        return {name: np.sign(sum(np.sign(g[name]) for g in grads)) for name in grads[0]}


class DataLens(Oracle):
    """TopAgg: f = sum of votes + N(0, sigma²), then alpha where f > beta w, -alpha below -beta w.

    Documented differences: a value of zero votes for nothing.
    """

    def __init__(self, fraction, beta, alpha=1.0, sigma=0.0, clip=None):
        super().__init__()
        self.fraction, self.beta, self.alpha = fraction, beta, alpha
        self.sigma, self.clip = sigma, clip

    def step(self, grads):
        rows = [flat(g) for g in grads]
        n = rows[0].size
        k = reference.kept(self.fraction, n)
        total = np.zeros(n)
        for worker, x in enumerate(rows):
            v = reference.votes(x, k)
            if self.clip is not None:
                chosen = np.flatnonzero(v)
                b = min(np.abs(x).max(), self.clip)
                up = uniform(keys(self.t, worker)[1], k) < 0.5 + x[chosen].clip(-b, b) / (2 * b)
                v[chosen] = np.where(up, 1.0, -1.0)
            total += v
        if self.sigma:
            key = keys(self.t, 0)[0]
            for fold in (1, 0):  # the noise, of the first part
                key = jax.random.fold_in(key, fold)
            noise = self.sigma * np.asarray(jax.random.normal(key, (n,)), np.float64)
            grid = 2.0 ** (math.floor(math.log2(self.sigma)) - 10)
            total += grid * np.round(noise / grid)
        bound = round(self.beta * len(rows), 6)
        out = self.alpha * np.where(total > bound, 1.0, np.where(total < -bound, -1.0, 0.0))
        self.mean = {name: np.ones(g.shape) for name, g in grads[0].items()}  # all of it is sure
        return unflat(out, grads[0])


class OneBitAdam(Oracle):
    """Algorithm 1 of 1-bit Adam, on chunks of the vector as np.array_split cuts it.

    Documented differences: each chunk has its own magnitude, what a worker has of the chunk that it
    averages is not compressed, and Adam's bias correction stays, that of v frozen. With `repeat` a
    chunk that is one value shorter than the first counts its last value twice in its magnitude,
    which the paper does not.
    """

    def __init__(self, warm_up, b1=0.9, b2=0.999, eps=1e-8, repeat=False):
        super().__init__()
        self.warm_up, self.b1, self.b2, self.eps = warm_up, b1, b2, eps
        self.repeat = repeat

    def start(self, grads):
        n = flat(grads[0]).size
        self.m, self.v, self.server = np.zeros(n), np.zeros(n), np.zeros(n)
        return [np.zeros(n) for _ in grads]

    def one_bit(self, x, workers):
        """||x||_1 / d sign(x) of each of the chunks."""
        chunks, out = np.array_split(x, workers), []
        for chunk in chunks:
            magnitudes = np.abs(chunk)
            if self.repeat and chunk.size < chunks[0].size:
                magnitudes = np.append(magnitudes, magnitudes[-1])
            out.append(magnitudes.mean() * np.where(chunk < 0, -1.0, 1.0))
        return np.concatenate(out)

    def step(self, grads):
        t, workers = self.t + 1, len(grads)
        if t <= self.warm_up:
            g = flat(mean(grads))
            self.m = self.b1 * self.m + (1 - self.b1) * g
            self.v = self.b2 * self.v + (1 - self.b2) * g**2
        else:
            sent = []
            for i, grad in enumerate(grads):
                x = self.b1 * self.m + (1 - self.b1) * flat(grad) + self.state[i]
                own = np.array_split(np.arange(x.size), workers)[i]
                sent.append(self.one_bit(x, workers))
                sent[-1][own] = x[own]
                self.state[i] = x - sent[-1]
            y = np.mean(sent, axis=0) + self.server
            self.m = self.one_bit(y, workers)
            self.server = y - self.m
        m_hat = self.m / (1 - self.b1**t)
        v_hat = self.v / (1 - self.b2 ** min(t, self.warm_up))
        return unflat(m_hat / (np.sqrt(v_hat) + self.eps), grads[0])


class MomentumCorrected(Oracle, abc.ABC):
    """Momentum correction, and masking where something was sent; which and what, a method says."""

    def __init__(self, fraction, momentum=0.9, nesterov=False, clip=None):
        super().__init__()
        self.fraction, self.m, self.nesterov, self.clip = fraction, momentum, nesterov, clip

    def start(self, grads):
        self.u = [zeros(g) for g in grads]
        return [zeros(g) for g in grads]

    @abc.abstractmethod
    def dense(self, v):
        """Whether the method leaves such a leaf to a dense exchange, with ordinary momentum."""

    @abc.abstractmethod
    def positions(self, worker, name, v):
        """What is sent of the flat leaf."""

    def values(self, name, v):
        """What stands for the values that are sent."""
        return v

    def clipped(self, grad, workers):
        """The local norm is clipped to N^-1/2 of the bound."""
        if self.clip is None:
            return grad
        norm = math.sqrt(sum(float(np.sum(g**2)) for g in grad.values()))
        bound = self.clip / math.sqrt(workers)
        return grad if norm <= bound else {name: g * bound / norm for name, g in grad.items()}

    def step(self, grads):
        sent = []
        for worker, grad in enumerate(grads):
            u, v = self.u[worker], self.state[worker]
            sent.append({})
            for name, g in self.clipped(grad, len(grads)).items():
                if self.nesterov:
                    u[name] = self.m * (u[name] + g)
                    v[name] = v[name] + u[name] + g
                else:
                    u[name] = self.m * u[name] + g
                    v[name] = v[name] + u[name]
                if self.dense(v[name]):
                    sent[-1][name], v[name] = v[name], np.zeros(g.shape)
                    continue
                chosen = self.positions(worker, name, v[name].ravel())
                s = np.zeros(g.size)
                s[chosen] = self.values(name, v[name].ravel()[chosen])
                u[name] = u[name].copy()
                u[name].reshape(-1)[chosen] = 0
                # Documented difference, of values that are replaced: what they lose is not cleared.
                sent[-1][name], v[name] = s.reshape(g.shape), v[name] - s.reshape(g.shape)
        return mean(sent)


class Dgc(MomentumCorrected):
    """The k largest of every tensor of more than one axis; documented: selected exactly."""

    def dense(self, v):
        return v.ndim < 2

    def positions(self, worker, name, v):
        return reference.top_k(v, reference.kept(self.fraction, v.size))


def trimmed_top_k(x, k):
    """The k largest, or all, of those values above zero that a falling threshold lets pass."""
    k = min(k, np.count_nonzero(x > 0))
    average, top = x.mean(), x.max()
    assert k == 0 or top > average, "where all are equal the threshold never falls"
    survivors, ratio = np.zeros(0, int), 1.0
    while survivors.size < k:
        ratio -= 0.2
        survivors = np.flatnonzero(x > average + ratio * (top - average))
    return survivors[np.argsort(-x[survivors], kind="stable")[:k]]


def searched_threshold(x, k):
    """Bisection of the ratio between mean and largest until k to 2k are larger.

    Documented differences: it goes on to a step of 2^-20, below the mean if too few exceed it; ours
    goes on by the bits of the threshold, which comes to the same unless the largest is far away.
    """
    bottom, top = x.mean(), x.max()
    if np.count_nonzero(x > bottom) < k:
        bottom, top = 0.0, bottom
    low, high = 0.0, 1.0
    while high - low > 2.0**-20:
        ratio = (low + high) / 2
        threshold = bottom + ratio * (top - bottom)
        count = np.count_nonzero(x > threshold)
        if k <= count <= 2 * k:
            return threshold
        if count < k:
            high = ratio
        else:
            low = ratio
    return bottom + low * (top - bottom)


class RedSync(MomentumCorrected):
    """The selection follows from a leaf's bytes.

    Quantized, the values of one sign are selected, of the other sign in the next step, and their
    mean is sent; a threshold is then not used again. `capacity` is a documented difference: where
    more than that many times k exceed a threshold, it is searched for again before its time.
    """

    def __init__(
        self,
        fraction,
        dense_below,
        trimmed_below,
        quantize=False,
        output=(),
        reuse=5,
        capacity=None,
        **momentum,
    ):
        super().__init__(fraction, **momentum)
        self.dense_below, self.trimmed_below = dense_below, trimmed_below
        self.quantize, self.output, self.reuse = quantize, output, reuse
        self.capacity, self.thresholds = capacity, {}

    def dense(self, v):
        return 4 * v.size < self.dense_below

    def quantized(self, name):
        return self.quantize and not any(word in name for word in self.output)

    def positions(self, worker, name, v):
        k = reference.kept(self.fraction, v.size)
        x = np.abs(v)
        if self.quantized(name):
            x = np.maximum(v if self.t % 2 == 0 else -v, 0)
        if 4 * v.size < self.trimmed_below:
            return trimmed_top_k(x, k)
        threshold, since = self.thresholds.get((worker, name), (np.inf, self.reuse))
        too_many = self.capacity is not None and (x > threshold).sum() > self.capacity * k
        if self.quantized(name) or since >= self.reuse or too_many:
            threshold, since = searched_threshold(x, k), 0
        self.thresholds[worker, name] = threshold, since + 1
        return np.flatnonzero(x > threshold)

    def values(self, name, v):
        return np.full(v.size, v.mean()) if self.quantized(name) and v.size else v


class AdaComp(Feedback):
    """What passes is sent; `per_bin`, documented, is how many a message has room for in a bin.

    Of what then does not fit, the highest positions stay behind.
    """

    def __init__(self, conv_bin, bin_size, per_bin=None):
        super().__init__()
        self.conv_bin, self.bin_size, self.per_bin = conv_bin, bin_size, per_bin

    def compress(self, a):
        size = self.conv_bin if a.ndim > 2 else self.bin_size
        g, h = a.ravel(), (a + self.grad).ravel()
        bins = [slice(i, i + size) for i in range(0, g.size, size)]
        scale = np.mean([np.abs(g[b]).max() for b in bins])
        s = np.zeros(g.size)
        for b in bins:
            s[b] = np.where(np.abs(h[b]) >= np.abs(g[b]).max(), scale * np.sign(g[b]), 0)
        if self.per_bin is not None:
            s[np.flatnonzero(s)[math.ceil(self.per_bin * g.size / size) :]] = 0
        return s.reshape(a.shape)


def gram_schmidt(p):
    """The columns made orthonormal, one after the other, as in the paper's code."""
    p = p.copy()
    for j in range(p.shape[1]):
        p[:, j] /= np.linalg.norm(p[:, j])
        p[:, j + 1 :] -= np.outer(p[:, j], p[:, j] @ p[:, j + 1 :])
    return p


class LowRank(Oracle):
    """Means of low rank, residuals, and the random factors that the iteration starts from."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def factors(self, grad, axis):
        out = {}
        for number, name in enumerate(sorted(grad)):
            if grad[name].ndim > 1:
                shape = grad[name].reshape(-1, grad[name].shape[-1]).shape
                factor = jax.random.normal(jax.random.key(number), (shape[axis], self.rank))
                out[name] = np.asarray(factor, np.float64)
        return out

    def step(self, grads):
        out = {}
        for name in grads[0]:
            leaves = [e[name] + g[name] for e, g in zip(self.state, grads, strict=True)]
            if name not in self.q:
                out[name] = self.dense(name, np.mean(leaves, axis=0))
                continue
            shape = leaves[0].shape
            mean, sent = self.exchange(name, [x.reshape(-1, shape[-1]) for x in leaves])
            out[name] = mean.reshape(shape)
            for e, x, own in zip(self.state, leaves, sent, strict=True):
                e[name] = x - own.reshape(shape)
        return out

    def dense(self, name, mean):
        return mean


class PowerSgd(LowRank):
    def start(self, grads):
        self.q = self.factors(grads[0], 1)
        return super().start(grads)

    def exchange(self, name, xs):
        p = gram_schmidt(np.mean([x @ self.q[name] for x in xs], axis=0))
        self.q[name] = np.mean([x.T @ p for x in xs], axis=0)
        return p @ self.q[name].T, [p @ self.q[name].T] * len(xs)


class AcpSgd(LowRank):
    """P in odd steps and Q in even ones, or the other way round where that balances them."""

    def start(self, grads):
        self.p, self.q = self.factors(grads[0], 0), self.factors(grads[0], 1)
        sides = [(len(self.p[name]), len(self.q[name])) for name in self.p]

        def most(orders):
            return max(
                sum(side[(turn + order) % 2] for side, order in zip(sides, orders, strict=True))
                for turn in (0, 1)
            )

        best = min(itertools.product((0, 1), repeat=len(sides)), key=most)
        self.order = dict(zip(self.p, best, strict=True))
        return super().start(grads)

    def exchange(self, name, xs):
        if (self.t + self.order[name]) % 2 == 0:
            q = gram_schmidt(self.q[name])
            own = [x @ q for x in xs]
            p = np.mean(own, axis=0)
            sent = [one @ q.T for one in own]
        else:
            p = gram_schmidt(self.p[name])
            own = [x.T @ p for x in xs]
            q = np.mean(own, axis=0)
            sent = [p @ one.T for one in own]
        self.p[name], self.q[name] = p, q
        return p @ q.T, sent


class Dion(LowRank):
    """The state is the momentum; what is no matrix goes through Adam."""

    def __init__(self, rank, decay, b1=0.9, b2=0.999):
        super().__init__(rank)
        self.decay, self.b1, self.b2 = decay, b1, b2

    def start(self, grads):
        self.q = self.factors(grads[0], 1)
        self.m, self.v = zeros(grads[0]), zeros(grads[0])
        return super().start(grads)

    def exchange(self, name, xs):
        p = gram_schmidt(np.mean([x @ self.q[name] for x in xs], axis=0))
        r = np.mean([x.T @ p for x in xs], axis=0)
        self.q[name] = r / np.linalg.norm(r, axis=0)
        fan_in, fan_out = xs[0].shape
        taken = (1 - self.decay) * p @ r.T
        return np.sqrt(fan_out / fan_in) * p @ self.q[name].T, [taken] * len(xs)

    def dense(self, name, mean):
        for e in self.state:
            e[name] = np.zeros_like(mean)
        self.m[name] = self.b1 * self.m[name] + (1 - self.b1) * mean
        self.v[name] = self.b2 * self.v[name] + (1 - self.b2) * mean**2
        m = self.m[name] / (1 - self.b1 ** (self.t + 1))
        v = self.v[name] / (1 - self.b2 ** (self.t + 1))
        return m / (np.sqrt(v) + 1e-8)


class DeMo(Feedback):
    def __init__(self, k, block, decay):
        super().__init__()
        self.k, self.block, self.decay = k, block, decay

    def step(self, grads):
        self.mean = self.average(grads)
        return {name: np.sign(leaf) for name, leaf in self.mean.items()}

    def compress(self, d):
        matrix = d.reshape(-1, d.shape[-1])
        rows, columns = matrix.shape
        high = 1 if rows == 1 else reference.block_of(rows, self.block)
        wide = reference.block_of(columns, self.block)
        padded = np.pad(matrix, ((0, -rows % high), (0, -columns % wide)))
        basis = [
            np.eye(1) if b == 1 else np.stack([reference.dct(row, b) for row in np.eye(b)])
            for b in (high, wide)
        ]
        for i in range(0, padded.shape[0], high):
            for j in range(0, padded.shape[1], wide):
                c = basis[0].T @ padded[i : i + high, j : j + wide] @ basis[1]
                c = keep(c, reference.top_k(c.ravel(), min(self.k, c.size)))
                padded[i : i + high, j : j + wide] = basis[0] @ c @ basis[1].T
        return padded[:rows, :columns].reshape(d.shape)


class Eden(Feedback):
    decay, together = 0.0, True
    # Max, "Quantizing for Minimum Distortion", 1960: the best four values for a normal variable.
    CENTROIDS = np.array([-1.5104, -0.4528, 0.4528, 1.5104])

    def __init__(self, block):
        super().__init__()
        self.block = block

    def compress(self, x):
        padded = np.pad(x, (0, -x.size % self.block))
        bits = np.asarray(keyed_bits(keys(self.t, 0)[0], padded.size))
        signs = np.where(bits >> 31, -1.0, 1.0)
        rotated = reference.hadamard(padded * signs, self.block).reshape(-1, self.block)
        norm = np.linalg.norm(rotated, axis=1, keepdims=True)
        y = rotated * np.sqrt(self.block) / norm
        q = self.CENTROIDS[np.abs(y[..., None] - self.CENTROIDS).argmin(-1)]
        scale = norm**2 / np.sum(rotated * q, axis=1, keepdims=True)
        return (reference.hadamard((scale * q).ravel(), self.block) * signs)[: x.size]


class ScaleCom(Oracle):
    def __init__(self, chunk, beta):
        super().__init__()
        self.chunk, self.beta = chunk, beta

    def step(self, grads):
        leader = self.t % len(grads)
        out = {}
        for name in grads[0]:
            p = [(m[name] + g[name]).ravel() for m, g in zip(self.state, grads, strict=True)]
            n = p[0].size
            if n <= self.chunk:
                sent = p
            else:
                starts = range(0, n, self.chunk)
                best = [i + np.abs(p[leader][i : i + self.chunk]).argmax() for i in starts]
                sent = [keep(x, best) for x in p]
            shape = grads[0][name].shape
            for m, x, s in zip(self.state, p, sent, strict=True):
                lost = (x - s).reshape(shape)
                m[name] = (1 - self.beta) * m[name] + self.beta * lost
            out[name] = np.mean(sent, axis=0).reshape(shape)
        return out


class FftSparsification(Feedback):
    """The paper's pipeline but for the quantizer, whose error the test allows for."""

    decay, together = 0.0, True

    def compress(self, g):
        z = reference.fft(g, None, half=True)
        chosen = reference.top_k(z, reference.kept(0.15, z.size))
        return reference.inverse_fft(np.isin(np.arange(z.size), chosen) * z, g.size, None)
