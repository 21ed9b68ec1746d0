"""The parameters of an island's program, and the same on the host, by their paths."""

import dataclasses
import hashlib
import json
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import PyTree
from fftgrad.exchanges import _layout
from fftgrad.islands import _together
from fftgrad.ops._shapes import by_path

Array: TypeAlias = np.ndarray[Any, Any]
Tree: TypeAlias = dict[str, Array]
"""Leaves by path, float32: the same for islands that keep them in other containers."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What a program trains: the paths, shapes and dtypes of its parameters, in their order."""

    structure: Any
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, params: PyTree) -> "Model":
        """That of these parameters."""
        _layout.check_tree("Island", "params", params)
        found = by_path(params)
        if not found:
            raise ValueError("Island(params): must have an array, got none; pass the parameters.")
        shapes = tuple(tuple(leaf.shape) for leaf in found.values())
        dtypes = tuple(str(leaf.dtype) for leaf in found.values())
        return cls(jax.tree.structure(params), tuple(found), shapes, dtypes)

    @property
    def described(self) -> list[list[Any]]:
        """Path, shape and dtype of each leaf, as JSON has them, in the order of the paths."""
        rows = zip(self.paths, self.shapes, self.dtypes, strict=True)
        return sorted([path, list(shape), dtype] for path, shape, dtype in rows)

    @property
    def digest(self) -> str:
        """By which two models are told apart."""
        text = json.dumps(self.described, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def likes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of `Tree`s of it."""
        return {
            path: jax.ShapeDtypeStruct(shape, jnp.float32)
            for path, shape in sorted(zip(self.paths, self.shapes, strict=True))
        }

    def check(self, params: PyTree) -> None:
        """Refuses other parameters than those of the model."""
        leaves, structure = jax.tree.flatten(params)
        if structure != self.structure:
            found = list(by_path(params))
            if tuple(found) != self.paths:
                raise ValueError(
                    f"Island.step(params): must have {list(self.paths)}, got {found}; pass the "
                    "parameters of the island."
                )
        for path, shape, dtype, leaf in zip(
            self.paths, self.shapes, self.dtypes, leaves, strict=True
        ):
            if (np.shape(leaf), str(leaf.dtype)) != (shape, dtype):
                raise ValueError(
                    f"Island.step(params): must have {dtype}{list(shape)} at {path!r}, got "
                    f"{leaf.dtype}{list(np.shape(leaf))}; pass the parameters of the island."
                )

    def to_host(self, params: PyTree) -> Tree:
        """A copy of the parameters, which may be donated or moved afterwards."""
        leaves = [_together.to_host(leaf) for leaf in jax.tree.leaves(params)]
        return dict(sorted(zip(self.paths, leaves, strict=True)))

    def as_held(self, tree: Tree) -> Tree:
        """The same as a program in these dtypes holds it."""
        dtypes = dict(zip(self.paths, self.dtypes, strict=True))
        return {path: leaf.astype(dtypes[path]).astype(np.float32) for path, leaf in tree.items()}

    def to_params(self, tree: Tree, like: PyTree) -> PyTree:
        """The parameters of the program, on the devices on which those it has are."""
        leaves = [
            _together.to_devices(tree[path], leaf)
            for path, leaf in zip(self.paths, jax.tree.leaves(like), strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def check_finite(tree: Tree) -> None:
    """Refuses parameters that no run can begin with."""
    if bad := [path for path, leaf in tree.items() if not np.isfinite(leaf).all()]:
        raise ValueError(
            f"Island(params): must be finite, got {bad}, which are not; see where they are from."
        )


def blended(own: Tree, common: Tree, share: float) -> Tree:
    """A share of an island's own leaves, where they are finite, and the rest of the common ones."""
    kept = np.float32(share)
    return {
        path: kept * own[path] + (1 - kept) * leaf if np.isfinite(own[path]).all() else leaf
        for path, leaf in common.items()
    }
