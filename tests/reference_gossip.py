"""CHOCO-SGD and BEER in NumPy, float64, from the papers' algorithms, with all copies.

Every worker keeps a copy of each neighbor, as the papers say; the library keeps two vectors.
"""

import numpy as np
import reference

top_k = reference.largest


def sign(x):
    return np.abs(x).mean() * np.where(x < 0, -1.0, 1.0)


def ring(n):
    """Each row has a third for the worker, and for the one on either side."""
    w = np.zeros((n, n))
    for i in range(n):
        for j in {i, (i - 1) % n, (i + 1) % n}:
            w[i, j] = 1 / len({i, (i - 1) % n, (i + 1) % n})
    return w


def torus(rows, columns):
    n = rows * columns
    w = np.zeros((n, n))
    for i in range(n):
        r, c = divmod(i, columns)
        around = {(r, c), ((r + 1) % rows, c), ((r - 1) % rows, c)}
        around |= {(r, (c + 1) % columns), (r, (c - 1) % columns)}
        for a, b in around:
            w[i, a * columns + b] = 1 / len(around)
    return w


def exponential(n):
    w = np.zeros((n, n))
    for i in range(n):
        around, far = {i}, 1
        while far < n:
            around |= {(i + far) % n, (i - far) % n}
            far *= 2
        for j in around:
            w[i, j] = 1 / len(around)
    return w


class Choco:
    """Algorithm 2 of arXiv:1902.00340; copies start as the first parameters."""

    def __init__(self, x, w, gamma, rate, compress):
        self.x, self.w, self.gamma, self.rate, self.c = x.copy(), w, gamma, rate, compress
        n = len(x)
        # copies[i][j]: what worker i holds to be x of j.
        self.copies = [{j: x[j].copy() for j in range(n) if w[i, j]} for i in range(n)]
        self.momentum = np.zeros_like(x)

    def step(self, gradient, momentum=0.0):
        n = len(self.x)
        self.momentum = momentum * self.momentum + gradient(self.x)
        half = self.x - self.rate * self.momentum
        q = [self.c(half[i] - self.copies[i][i]) for i in range(n)]
        for i in range(n):
            for j in self.copies[i]:
                self.copies[i][j] = self.copies[i][j] + q[j]
        for i in range(n):
            own = self.copies[i][i]
            pull = sum(self.w[i, j] * (copy - own) for j, copy in self.copies[i].items())
            self.x[i] = half[i] + self.gamma * pull


class Beer:
    """X+ = X + γ H (W - I) - η V; H+ = H + C(X+ - H); V+ = V + γ G (W - I) + ∇(X+) - ∇(X);
    G+ = G + C(V+ - G), of which the first V is ∇(X), as the authors' code begins.
    """

    def __init__(self, x, w, gamma, rate, compress, compress_gradients=None):
        self.x, self.w, self.gamma, self.rate, self.c = x.copy(), w, gamma, rate, compress
        self.cg = compress_gradients or compress
        self.h, self.g = x.copy(), np.zeros_like(x)
        self.v = self.last = None

    def mix(self, copies):
        return self.w @ copies - copies

    def step(self, gradient):
        now = gradient(self.x)
        if self.v is None:
            self.v = now.copy()
        else:
            self.v = self.v + self.gamma * self.mix(self.g) + now - self.last
        self.last = now
        self.g = self.g + np.stack([self.cg(d) for d in self.v - self.g])
        self.x = self.x + self.gamma * self.mix(self.h) - self.rate * self.v
        self.h = self.h + np.stack([self.c(d) for d in self.x - self.h])
