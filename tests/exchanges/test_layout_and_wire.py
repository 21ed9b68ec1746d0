"""Trees to vectors and back, payloads to words and back."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TREE, gradients

import fftgrad as fg
from fftgrad.exchanges import _bucketing
from fftgrad.ops import _finite, _wire
from fftgrad.ops._shapes import by_path


@pytest.mark.parametrize("limit", [7, 64, 177, 178, 179, 2**30])
@pytest.mark.parametrize("by_bytes", [False, True])
def test_buckets_never_exceed_the_limit_and_lose_nothing(limit, by_bytes, monkeypatch):
    tree = jax.tree.map(lambda g: g[0], gradients(TREE, 1))
    monkeypatch.setattr(_bucketing, "BUCKET_LIMIT", limit)
    bucketing = fg.Bucketing(bucket_bytes=4 * limit if by_bytes else None)

    @jax.jit
    def there_and_back(tree):
        buckets, join = _bucketing.to_buckets(tree, bucketing)
        return [[part.value for part in bucket] for bucket in buckets], join(buckets)

    buckets, back = there_and_back(tree)
    likes = _bucketing.bucket_likes(tree, bucketing)
    assert jax.tree.map(jnp.shape, buckets) == [[p.value.shape for p in b] for b in likes]
    vectors = [vector for bucket in buckets for vector in bucket]
    assert max(v.size for v in vectors) <= limit
    assert len({v.size for v in vectors[:-1]}) <= 1
    # Of equal length, as far as the number of values allows.
    assert vectors[0].size - vectors[-1].size < len(vectors)
    for got, given in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(got, np.asarray(given, np.float32))


MATRICES = {
    "a": jax.ShapeDtypeStruct((30, 40), jnp.float32),
    "b": jax.ShapeDtypeStruct((40,), jnp.float32),
    "c": jax.ShapeDtypeStruct((2, 5, 20), jnp.float32),
}


@pytest.mark.parametrize("scope", ["leaf", lambda path, _: f"of {path}"], ids=["leaf", "function"])
def test_a_leaf_on_its_own_keeps_its_shape_in_a_bucket_that_is_smaller(scope):
    tree = jax.tree.map(lambda g: g[0], gradients(MATRICES, 1))
    bucketing = fg.Bucketing(scope, bucket_bytes=4 * 100)
    buckets, join = _bucketing.to_buckets(tree, bucketing)
    assert [[part.value.shape for part in bucket] for bucket in buckets] == [
        [(2, 5, 20)],
        [(40,)],
        [(30, 40)],
    ]
    back = join(buckets)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, tree))


@pytest.mark.parametrize("bucket_bytes", [4, 4 * 100, 4 * 1200, None])
def test_a_smaller_bucket_changes_no_factors(bucket_bytes):
    """They were sent dense, in pieces without a shape."""
    bucketing = fg.Bucketing(bucket_bytes=bucket_bytes)
    assert fg.wire_bytes(fg.PowerSgd(2), MATRICES, bucketing) == 4 * (2 * 70 + 40 + 2 * 30)


def test_one_vector_of_all_leaves_is_cut_though_it_be_one_leaf():
    sizes = [bucket[0].value.size for bucket in _bucketing.bucket_likes(
        MATRICES["a"], fg.Bucketing("model", bucket_bytes=4 * 400)
    )]  # fmt: skip
    assert sizes == [400, 400, 400]


@pytest.mark.parametrize("name", [None, 3, ("a", "b"), b"a"], ids=repr)
def test_a_scope_that_names_no_group_is_answered(name):
    bucketing = fg.Bucketing(lambda *_: name)
    with pytest.raises(TypeError, match=r"Bucketing\(scope\): must return .*, got .*; return"):
        fg.wire_bytes(fg.TopK(k=3), MATRICES, bucketing)


ALIKE = [
    ({"a/b": 1, "a": {"b": 2}, "c/d": 4}, {"['a']['b']": 2, "['a/b']": 1, "c/d": 4}),
    ({"x": {"": 1}, "x/": 2}, None),
]


@pytest.mark.parametrize(("tree", "paths"), ALIKE)
@pytest.mark.parametrize("scope", ["leaf", lambda path, _: path], ids=["leaf", "function"])
def test_leaves_whose_paths_have_the_same_text_are_parts_of_their_own(tree, paths, scope):
    tree = jax.tree.map(lambda value: np.full((3, 4), value, np.float32), tree)
    buckets, join = _bucketing.to_buckets(tree, fg.Bucketing(scope))
    found = {part.name: part.value[0, 0] for bucket in buckets for part in bucket}
    assert len(found) == len(jax.tree.leaves(tree))
    assert paths is None or found == paths
    assert jax.tree.all(jax.tree.map(np.array_equal, join(buckets), tree))
    assert fg.wire_bytes(fg.Sign(), tree, fg.Bucketing(scope)) == 4 + 8 * len(found)


def test_a_path_is_as_its_keys_where_no_other_has_its_text():
    tree = {"mlp/linear_0": {"w": MATRICES["a"]}, "50%": MATRICES["b"]}
    assert list(by_path(tree)) == ["50%", "mlp/linear_0/w"]


def test_keys_that_differ_in_their_type_alone_are_told_apart():
    class Both:
        pass

    keys = tuple(map(jax.tree_util.DictKey, (1, "1")))
    jax.tree_util.register_pytree_with_keys(
        Both, lambda _: (((keys[0], 1), (keys[1], "1")), None), lambda *_: Both()
    )
    assert by_path(Both()) == {"[1]": 1, "['1']": "1"}


def test_a_leaf_too_long_for_any_bucket_is_cut_in_every_scope():
    big = {"w": jax.ShapeDtypeStruct((3, 2**29 + 5), jnp.float32)}
    for scope in ("leaf", lambda path, _: path):
        buckets = _bucketing.bucket_likes(big, fg.Bucketing(scope, bucket_bytes=400))
        assert [len(part.value.shape) for bucket in buckets for part in bucket] == [1, 1]


@pytest.mark.parametrize("scope", ["leaf", lambda path, leaf: f"{leaf.ndim} axes of {path[0]}"])
@pytest.mark.parametrize("limit", [64, 177, 2**20])
def test_parts_travel_in_the_order_of_their_names(scope, limit):
    """Whatever the order of the leaves. Payloads and draws go by it."""
    tree = jax.tree.map(lambda g: g[0], gradients(TREE, 1))
    for bucketing in (fg.Bucketing(scope), fg.Bucketing(scope, bucket_bytes=4 * limit)):
        buckets = [[part.name for part in b] for b in _bucketing.to_buckets(tree, bucketing)[0]]
        assert buckets == [sorted(names) for names in buckets]
        assert max(map(len, buckets)) > 1


def test_more_than_2_to_the_30_parameters_are_split():
    big = {"w": jax.ShapeDtypeStruct((3, 2**29 + 5), jnp.float32)}
    buckets = _bucketing.bucket_likes(big, fg.Bucketing())
    sizes = [part.value.size for bucket in buckets for part in bucket]
    assert sum(sizes) == 3 * (2**29 + 5)
    assert len(sizes) == 2
    assert max(sizes) <= 2**30
    assert fg.wire_bytes(fg.AllReduce(), big) == 12 * (2**29 + 5)
    codec = fg.chain(fg.TopK(fraction=0.01), fg.RangeFloat(6))
    assert 8 * fg.wire_bytes(codec, big) / sum(sizes) < 0.147


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int16", "complex64")


@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_payloads_of_every_width_survive_the_wire_bit_for_bit(size):
    leaves = {dtype: np.arange(size).astype(dtype) for dtype in DTYPES}
    payload = fg.codecs.Payload(leaves, {"scale": np.float32(0.5)})

    @jax.jit
    def there_and_back(payload):
        words = _wire.pack(payload, np.False_, np.int32(12345))
        return words, *_wire.unpack(words, payload)

    words, back, *header = there_and_back(payload)
    padded = sum(-(-leaf.nbytes // 4) * 4 for leaf in leaves.values())
    assert words.nbytes == _wire.nbytes(payload) == 4 + padded + 4
    assert list(map(int, header)) == [False, 12345]
    assert jax.tree.structure(back) == jax.tree.structure(payload)
    for got, sent in zip(jax.tree.leaves(back), jax.tree.leaves(payload), strict=True):
        assert got.dtype == sent.dtype
        assert np.asarray(got).tobytes() == np.asarray(sent).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 7, 1009])
def test_one_value_that_is_not_finite_is_seen(dtype, size):
    finite = jax.jit(_finite.all_finite)
    most = jnp.finfo(dtype).max
    for value in (0, most, -most):
        fine = np.full(size, value, dtype)
        assert finite([np.ones(3, np.float32), fine, np.zeros(0, dtype)])
        for bad in (np.nan, np.inf, -np.inf):
            spoiled = np.where(np.arange(size) == size // 2, np.array(bad, dtype), fine)
            assert not finite([np.ones(3, np.float32), spoiled, np.zeros(0, dtype)])


def test_the_first_word_tells_of_values():
    payload = fg.codecs.Payload(np.ones(1, np.float32))

    @jax.jit
    def there_and_back(finite, count):
        words = _wire.pack(payload, finite, count)
        return words[0], _wire.unpack(words, payload)[1:]

    for count, finite in itertools.product((0, 1, 2**30 - 1, 2**31 - 1), (True, False)):
        word, header = there_and_back(finite, np.int32(count))
        told = min(count, 2**30 - 1)  # as many values as a bucket has, but for one
        assert int(word) == (2 * told + finite) % 2**32
        assert list(map(int, header)) == [finite, told]
