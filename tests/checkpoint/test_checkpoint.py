"""To stop and go on is never to have stopped, whatever happens to the files."""

import gc
import itertools
import json
import pathlib
import signal
import time
import warnings

import goldens
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import EXCHANGES, MEMORIES, METHODS, sample
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import AXIS, mesh_of
from processes import ROOT, free_port, running
from updates import WORKERS

import fftgrad as fg
from fftgrad import checkpoint
from fftgrad.checkpoint import _storage, _sums

LIKE = {"w": np.zeros((3, 3, 8), np.float32), "b": np.zeros(20, np.float32)}
PROGRAM = str(ROOT / "tests/checkpoint_program.py")


def grads(seed, workers=WORKERS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=(workers, *p.shape)).astype("float32"), LIKE)


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type(a) is type(b)
        if isinstance(b, jax.Array):
            assert a.dtype == b.dtype
            assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
            if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def in_wrappers():
    """One in the others, saved in the midst of an accumulation."""
    mean = fg.compressed_pmean(
        EXCHANGES["gather adaptive"],
        fg.ErrorFeedback(),
        axis_name=AXIS,
        track_error=True,
        non_finite="skip",
    )
    rate = optax.linear_schedule(1e-2, 1e-3, 5)
    after = optax.apply_if_finite(optax.inject_hyperparams(optax.adamw)(rate), 3)
    local = fg.training.local_state(optax.adam(1e-2))
    return fg.training.multi_steps(optax.chain(local, mean, after), every=3)


def in_fragments():
    return fg.optimizers.diloco(
        optax.adam(1e-2), optax.sgd(0.7, 0.9, nesterov=True), 4, fragments=2, overlap_steps=1,
        mixing=0.5, axis_name=AXIS,
    )  # fmt: skip


OTHERS = {"wrappers": in_wrappers, "fragments": in_fragments}


def feedback():
    return fg.compressed_pmean(EXCHANGES["gather top-k"], fg.ErrorFeedback(), axis_name=AXIS)


def shapes_of(name):
    """Those of the state of a row of the tables, of all workers."""
    if name in EXCHANGES or name in MEMORIES:
        exchange = EXCHANGES.get(name, EXCHANGES["gather top-k"])
        memory = MEMORIES.get(name, fg.ErrorFeedback())
        tx = fg.compressed_pmean(exchange, memory, axis_name=AXIS)
    else:
        tx = OTHERS[name]() if name in OTHERS else METHODS[name](AXIS)
    rows = jax.tree.map(lambda s: jax.ShapeDtypeStruct((4, *s.shape), s.dtype), goldens.LIKE)
    return jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), rows)


def filled(shapes, seed):
    """A state of any bits."""
    rng = np.random.default_rng(seed)

    def of(leaf):
        bits = rng.integers(0, 2, (*leaf.shape, leaf.dtype.itemsize), np.uint8)
        return jnp.asarray(bits.view(leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(of, shapes)


@pytest.mark.parametrize("name", [*sample(METHODS), *sample(EXCHANGES), *MEMORIES, *OTHERS])
def test_a_state_comes_back_to_the_bit(tmp_path, name):
    """Of whatever makes one, so that to go on is never to have stopped."""
    state = filled(shapes_of(name), 1)
    checkpoint.save(tmp_path, 2, state)
    again, step, *_ = checkpoint.restore(tmp_path, filled(shapes_of(name), 2))
    assert step == 2
    assert_same(again, state)


def sharded(workers):
    """A mesh, a transformation on it, a step, and a fresh tree."""
    mesh = mesh_of(workers)
    tx = optax.chain(feedback(), optax.rmsprop(1e-2))

    def step(params, state, g):
        updates, state = tx.update(jax.tree.map(lambda a: a[0], g), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.device_put(LIKE, NamedSharding(mesh, P()))
    tree = {
        "params": params,
        "state": fg.init_state(tx, params, mesh, AXIS),
        "key": jax.random.key(3),
        "n": 1,
    }
    return fg.data_parallel(step, mesh, AXIS), tree


def trained(train, tree, seeds, workers=WORKERS):
    params, state = tree["params"], tree["state"]
    for seed in seeds:
        params, state = train(params, state, grads(seed, workers))
    return {**tree, "params": params, "state": state}


@pytest.fixture(scope="module")
def run():
    train, fresh = sharded(WORKERS)
    return train, fresh, trained(train, fresh, range(2))


def test_it_comes_back_where_it_was_and_goes_on(tmp_path, run):
    train, fresh, tree = run
    checkpoint.save(tmp_path, 7, tree)
    found = checkpoint.restore(tmp_path, fresh)
    assert_same(found.tree, tree)
    assert found[1:] == (7, (WORKERS, WORKERS))
    ends = [trained(train, start, range(2, 4)) for start in (tree, found.tree)]
    assert_same(*ends)
    assert train._cache_size() == 1
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), fresh["state"]
    )
    checkpoint.save(tmp_path, 8, tree["state"])
    assert_same(checkpoint.restore(tmp_path, shapes).tree, tree["state"])


def test_shapes_that_lie_nowhere_are_no_damage(tmp_path, run):
    _, _, tree = run
    checkpoint.save(tmp_path, 1, tree["state"])
    mesh = jax.sharding.AbstractMesh((WORKERS,), (AXIS,))
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P())),
        tree["state"],
    )
    with pytest.raises(ValueError, match=r"restore\(like\): .*; pass a fresh state"):
        checkpoint.restore(tmp_path, like)


@pytest.mark.parametrize("workers", [8, 3])
def test_with_another_number_of_workers(tmp_path, run, workers):
    _, _, tree = run
    checkpoint.save(tmp_path, 1, tree)
    train, fresh = sharded(workers)
    found = checkpoint.restore(tmp_path, fresh)
    assert found.workers == (WORKERS, workers)
    wanted = fg.checkpoint.reshard_state(tree["state"], fresh["state"])
    assert_same(found.tree["state"], wanted.state)
    where = [jax.tree.map(lambda a: a.sharding, t["state"]) for t in (found.tree, fresh)]
    assert where[0] == where[1]
    mean = [
        np.asarray(t["state"][0].memory.worker_rows.residual["w"]).mean(0)
        for t in (tree, found.tree)
    ]
    np.testing.assert_allclose(mean[0], mean[1], atol=1e-6)
    after = trained(train, found.tree, range(2), workers)
    assert int(after["state"][0].skipped) == 0
    assert int(after["state"][0].step) == 4


CHANGES = {
    "renamed": (
        lambda p: {"v": p["w"], "b": p["b"]},
        r"params\.v must be .*params\.w has no place",
    ),
    "added": (lambda p: {**p, "c": p["b"]}, r"params\.c must be float32\[20\], got nothing"),
    "removed": (lambda p: {"w": p["w"]}, r"params\.b has no place"),
    "reshaped": (lambda p: {**p, "b": p["b"][:9]}, r"params\.b must be .*\[9\], got float32\[20\]"),
    "cast": (lambda p: {**p, "b": p["b"].astype("bfloat16")}, r"params\.b must be bfloat16"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_parameter_is_named(tmp_path, name):
    change, match = CHANGES[name]
    params = {"w": np.ones((3, 4), np.float32), "b": np.arange(20, dtype=np.float32)}
    checkpoint.save(tmp_path, 1, {"params": params})
    fresh = {"params": change(jax.tree.map(np.zeros_like, params))}
    with pytest.raises(ValueError, match=match):
        checkpoint.restore(tmp_path, fresh)
    with pytest.warns(RuntimeWarning, match="missing='zero'"):
        found = checkpoint.restore(tmp_path, fresh, missing="zero")
    for key, leaf in found.tree["params"].items():
        kept = key in params and leaf.shape == params[key].shape and leaf.dtype == "float32"
        np.testing.assert_array_equal(leaf, params[key] if kept else np.zeros_like(leaf))


def damage(file: pathlib.Path, how: str):
    data = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(data[: len(data) // 2])
    elif how == "gone":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


# Orbax leaves coroutines behind that it does not await.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["truncated", "gone", "flipped"])
def test_the_checkpoint_before_a_damaged_one_is_taken(tmp_path, how):
    """Each file on its own: what comes back is the newest to the bit, or the one before it."""
    fresh, tree = ({"state": filled(shapes_of("gather top-k"), seed)} for seed in (1, 2))
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {**tree, "n": step})
    passed = 0
    for file in sorted(f for f in (tmp_path / "2").rglob("*") if f.is_file() and f.stat().st_size):
        data = file.read_bytes()
        damage(file, how)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = checkpoint.restore(tmp_path, {**fresh, "n": 0})
        assert found.step == found.tree["n"]
        assert_same(found.tree["state"], tree["state"])
        if found.step == 1 and file.name != "commit_success.txt":
            passed += 1
            assert "skips step 2, which is damaged" in str(said[0].message)
            with (
                pytest.warns(RuntimeWarning),
                pytest.raises(FileNotFoundError, match="a checkpoint of step 2 that is intact"),
            ):
                checkpoint.restore(tmp_path, {**fresh, "n": 0}, step=2)
        file.write_bytes(data)
    assert passed >= 3
    assert checkpoint.restore(tmp_path, {**fresh, "n": 0}).step == 2
    gc.collect()


def test_other_bits_than_were_saved_are_seen(tmp_path):
    """Where the files are whole and hold something else: the sums tell."""
    checkpoint.save(tmp_path, 1, {"w": jnp.arange(5.0)})
    about = tmp_path / "1" / "about" / "metadata"
    leaves = json.loads(about.read_text())["leaves"]
    leaves["w"]["sum"] ^= 1
    about.write_text(json.dumps(_storage.signed(leaves)))
    with (
        pytest.warns(RuntimeWarning, match="w has other bits than the saved ones"),
        pytest.raises(FileNotFoundError),
    ):
        checkpoint.restore(tmp_path, {"w": jnp.zeros(5)})


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    """A limit on the size of a file stands in for the disk: the writes fail alike."""
    import resource

    small, big = (
        {"w": jnp.arange(9.0)},
        {"w": jnp.asarray(np.random.default_rng(0).normal(size=1 << 18))},
    )
    checkpoint.save(tmp_path, 1, small)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(Exception, match=r"(?i)too large|write"):
            checkpoint.save(tmp_path, 2, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert checkpoint.restore(tmp_path, small).step == 1
    checkpoint.save(tmp_path, 2, small)
    assert checkpoint.restore(tmp_path, small).step == 2


REPLICATED = P()


def copies(*values, spec=REPLICATED, shape=(4,), names=(AXIS,)):
    """An array that counts as replicated, of which each device has another value."""
    devices = jax.devices()[: len(values)]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), names)
    sharding = NamedSharding(mesh, spec)
    placed = [jax.device_put(v, d) for v, d in zip(values, devices, strict=True)]
    axes = [mesh.shape.get(name, 1) for name in (*spec, *[None] * 9)]
    whole = tuple(n * axis for n, axis in zip(np.shape(values[0]), axes, strict=False))
    return jax.make_array_from_single_device_arrays(whole, sharding, placed)


W = np.arange(6, dtype=np.float32).reshape(2, 3)
OTHER = np.where(W == 4, 4 + 2**-21, W).astype(np.float32)
ALIKE = {
    "equal": copies(W, W, W, W),
    "rows": copies(W, OTHER, W, OTHER, spec=P(AXIS)),
    "shards": copies(W, OTHER, W, OTHER, spec=P(None, "m"), shape=(2, 2), names=(AXIS, "m")),
    "four bits": copies(*[np.arange(4, dtype=jnp.int4)] * 4),
    "empty": copies(*[np.zeros((0, 3), np.float32)] * 4),
    "on the host": W,
    "keys": jax.device_put(jax.random.key(1), NamedSharding(mesh_of(4), P())),
}
DIVERGED = {
    "a bit": copies(W, W, OTHER, W),
    "a NaN": copies(*[np.float32([1, np.nan])] * 3, np.ones(2, np.float32)),
    "scalars": copies(*map(np.int32, [3, 3, 4, 3])),
    "narrow": copies(*[np.ones(3, jnp.bfloat16)] * 3, np.full(3, 2, jnp.bfloat16)),
    "four bits": copies(*[np.arange(4, dtype=jnp.int4)] * 3, np.zeros(4, jnp.int4)),
    "shards": copies(W, OTHER, W, W, spec=P(None, "m"), shape=(2, 2), names=(AXIS, "m")),
}


def test_copies_that_are_equal_are_saved(tmp_path):
    tree = {"n": 1, "w": ALIKE}
    checkpoint.save(tmp_path, 1, tree)
    assert_same(checkpoint.restore(tmp_path, tree).tree, tree)


@pytest.mark.parametrize("name", DIVERGED)
def test_copies_that_differ_are_refused(tmp_path, name):
    """No restore would take them for what was written."""
    tree = {"fine": copies(W, W, W, W), "state": [DIVERGED[name]]}
    for call in (
        lambda: checkpoint.save(tmp_path, 1, tree),
        lambda: fg.checkpoint.reshard_state(tree, tree),
    ):
        with pytest.raises(
            ValueError, match=r"\(state\.0\): must be the same on all .*; .*fg\.state_specs"
        ):
            call()
    assert not list(tmp_path.iterdir())


STORED = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "complex64", "complex128"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float16", "bfloat16", "float32", "float64"),
)
NUMBERS = [-(2**63), 2**64 - 1, 0, -0.0, 5e-324, np.inf, 1e308 - 1e-9j, True]


def stored(rng):
    """Leaves of any bits: arrays of NumPy and JAX, scalars, Python numbers and PRNG keys."""
    yield from NUMBERS if rng else (type(number)() for number in NUMBERS)
    keys = [jax.random.key(9 if rng else 99, impl=impl) for impl in ("rbg", "threefry2x32")]
    yield from (*keys, jnp.stack(keys[:1])[:0])
    for name, shape in itertools.product(STORED, [(), (3,), (2, 3), (0, 2)]):
        dtype = np.dtype(name)
        bits = 1 if dtype == np.bool_ else min(8, jax.dtypes.itemsize_bits(dtype))
        data = np.zeros((*shape, dtype.itemsize), np.uint8)
        data = rng.integers(0, 2**bits, data.shape, np.uint8) if rng else data
        array = data.view(dtype).reshape(shape)
        yield array
        if not shape:
            yield array[()]
        is_one = shape == (3,) or (shape, name) == ((0, 2), "float32")
        if is_one and dtype == jax.dtypes.canonicalize_dtype(name):
            yield jnp.asarray(array)


def test_a_leaf_that_is_saved_comes_back(tmp_path):
    tree, blank = (
        {"leaves": list(stored(rng)), "none": None} for rng in (np.random.default_rng(0), None)
    )
    checkpoint.save(tmp_path, 1, tree)

    def shape(a):
        is_key = jnp.issubdtype(getattr(a, "dtype", int), jax.dtypes.prng_key)
        plain = isinstance(a, jax.Array) and not is_key
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) if plain else a

    shapes = jax.tree.map(shape, blank)
    for like in (blank, shapes):
        assert_same(checkpoint.restore(tmp_path, like).tree, tree)


NOT_STORED = {
    "uint4": np.zeros(2, "uint4"),
    "empty uint4": np.zeros((0, 2), "uint4"),
    "uint4 of JAX": jnp.zeros(2, jnp.uint4),
    "big endian": np.zeros(2, ">f4"),
    "long double": np.zeros(2, "longdouble"),
    "objects": np.zeros(2, "O"),
    "times": np.zeros(2, "M8[s]"),
    "records": np.zeros(2, "f4,i4"),
    "masked": np.ma.array([1.0, 2.0], mask=[True, False]),
    "large int": 2**64,
    "text": "text",
    "function": print,
}


def test_a_leaf_that_would_not_come_back_is_named(tmp_path):
    for leaf in NOT_STORED.values():
        with pytest.raises(TypeError, match=r"save\(tree\['state'\]\[1\]\): must be an array"):
            checkpoint.save(tmp_path / "run", 1, {"w": np.ones(2), "state": [1, leaf]})
        assert not (tmp_path / "run").exists()


def test_what_is_refused(tmp_path):
    tree = {"w": jnp.zeros(2)}
    with pytest.raises(FileNotFoundError, match="must have a checkpoint that is intact"):
        checkpoint.restore(tmp_path / "none", tree)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="must be at least 2"):
        checkpoint.save(tmp_path, 1, tree, keep=1)
    checkpoint.save(tmp_path, 1, tree)
    with pytest.raises(ValueError, match="must be later than the newest"):
        checkpoint.save(tmp_path, 1, tree)
    with pytest.raises(TypeError, match=r"pass int\(step\)"):
        checkpoint.save(tmp_path, "2", tree)
    with pytest.raises(ValueError, match=r"save\(directory\): must be a path, .*mount"):
        checkpoint.save("s3://bucket/run", 1, tree)


def test_containers_may_differ_and_keys_with_dots_and_slashes_are_kept_apart(tmp_path):
    one, third = np.ones(1), np.float64(1 / 3)
    tree = {"a": [one, third], "n": None, "a.b": 2 * one, "c": {"b": 0 * one}, "c/b c%": 3 * one}
    checkpoint.save(tmp_path, 1, tree)
    like = {**jax.tree.map(np.zeros_like, tree), "a": (np.zeros(1), np.float64(0))}
    assert_same(checkpoint.restore(tmp_path, like).tree, {**tree, "a": (one, third)})


def test_the_newest_are_kept(tmp_path):
    for step in range(5):
        checkpoint.save(tmp_path, step, {"w": np.full(2, float(step))}, keep=3)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [2, 3, 4]


@pytest.mark.parametrize(
    "x",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(5, dtype=np.int8),
        np.array([True, False]),
        np.arange(4) * (1 + 2j),
        np.float32(3),
        np.zeros((0, 2), np.float32),
        np.arange(5).astype(jnp.bfloat16),
        np.arange(-3, 3).astype(jnp.int4),
    ],
    ids=str,
)
def test_the_sum_is_the_same_on_devices_and_sees_each_bit(x):
    x = np.asarray(x)
    x = x.astype(np.complex64) if x.dtype == np.complex128 else x
    total = _sums.total(x)
    assert total == int(jax.jit(_sums._on_devices)(jnp.asarray(x)))
    data = np.frombuffer(x.tobytes(), np.uint8)
    for place in range(0 if x.dtype == np.bool_ else data.size):
        other = data.copy()
        other[place] ^= 1 << place % min(8, jax.dtypes.itemsize_bits(x.dtype))
        assert _sums.total(np.frombuffer(other.tobytes(), x.dtype).reshape(x.shape)) != total


@pytest.mark.smoke
@pytest.mark.processes
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_it_may_be_killed_at_any_instant(tmp_path, kills):
    """Killed at random instants, in steps and in writes, each next process goes on as if not."""
    cache, folder = tmp_path / "compiled", str(tmp_path / "run")
    rng = np.random.default_rng(0)
    done = 0
    for _ in range(kills):
        with running(tmp_path, [[PROGRAM, folder, "1000", "1"]], cache=cache) as (p,):
            assert p.said(f"saved {done + 2}\n"), p.err.read_text()
            time.sleep(rng.uniform(0, 0.1))
            p.popen.send_signal(signal.SIGKILL)
            p.wait()
            restored = int(p.told[0].split()[1]) if done else 0
            assert restored >= done
            done = int(p.told[-1].split()[1])
    saved = max(int(f.name) for f in pathlib.Path(folder).iterdir() if f.name.isdigit())
    rest, whole = [folder, str(done + 3 - saved), "9999"], [str(tmp_path / "whole"), str(done + 3)]
    with running(tmp_path, [[PROGRAM, *rest, "and", *whole, "9999"]], cache=cache) as (p,):
        assert p.wait() == 0, p.err.read_text()
        went_on, anew = p.told[0], p.told[2]
        assert (went_on.split()[0], anew) == ("restored", "anew")
        assert p.told[1] == p.told[3]


@pytest.mark.processes
def test_several_processes_save_and_another_number_goes_on(tmp_path):
    """Two processes of two workers, of which one is killed; then one process of its own."""
    cache, folder = tmp_path / "compiled", str(tmp_path / "run")

    def commands(steps, every):
        address = f"localhost:{free_port()}"
        return [[PROGRAM, folder, steps, every, address, "2", str(i)] for i in range(2)]

    with running(tmp_path, commands("100000", "2"), cache=cache) as (first, second):
        assert first.said("saved 4"), first.err.read_text()
        second.popen.send_signal(signal.SIGKILL)
        start = time.monotonic()
        assert first.wait() != 0
        assert time.monotonic() - start < 80  # without an end of its own it takes longer
    with running(tmp_path, commands("1", "1"), cache=cache) as both:
        assert [p.wait() for p in both] == [0, 0], [p.err.read_text() for p in both]
        assert all("restored" in p.told[0] and "(4, 4)" in p.told[0] for p in both)
        assert all("refused save(w): must be the same" in p.told[-2] for p in both)
    own = {"JAX_NUM_CPU_DEVICES": "3"}
    with running(tmp_path, [[PROGRAM, folder, "1", "9"]], [own], cache=cache) as (p,):
        assert p.wait() == 0, p.err.read_text()
        assert "(4, 3)" in p.told[0]
