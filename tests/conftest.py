"""Eight CPU devices, strict promotion, and hypothesis profiles; before any test imports JAX."""

import ctypes
import functools
import gc
import hashlib
import math
import os
import pathlib
import platform as machine
import sys

DEVICES = 8
# The devices share one pool of threads: where all of its threads wait in a collective, nothing is
# left to compute what they wait for. The default size is the number of cores.
os.environ.setdefault("PJRT_NPROC", str(4 * DEVICES))

import hypothesis  # noqa: E402  (after the setting)
import jax  # noqa: E402  (after the setting)
import jaxlib  # noqa: E402  (after the setting)
import pytest  # noqa: E402  (after the setting)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
# The suite is thousands of small programs that run once: it waits for the compiler.
jax.config.update("jax_disable_most_optimizations", True)
QUICK = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if jax.__version_info__ < (0, 11):  # later versions end at a flag that they do not know
    QUICK += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join([*QUICK, os.environ.get("XLA_FLAGS", "")])


def programs() -> pathlib.Path:
    """The folder of compiled programs: a module has what others compiled, a run what the last did.

    It is outside the checkout, for all checkouts on this machine. Programs for other processors
    may not run here, and their home may be the same.
    """
    cpu = pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else [machine.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    kind = f"{jax.__version__} {jaxlib.__version__} {machine.machine()} {flags}"
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return home / "fftgrad-tests" / hashlib.sha256(kind.encode()).hexdigest()[:16]


jax.config.update("jax_compilation_cache_dir", str(programs()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
TESTS = str(pathlib.Path(__file__).parent)
LIMIT = 600
"""Seconds that a test of several processes may take, on a machine that has other things to do."""
LIBC, MOST = ctypes.CDLL(None), 1_400_000_000
"""Bytes of a worker above which it frees its programs between two groups; a fifth more, at once."""
# Tracing makes many objects that stay: looking through them again and again is a sixth of its time.
gc.set_threshold(100_000, 20, 20)


def _roomy(run):
    return run()


# CPython 3.11 keeps frames in pieces of 16 KB, and maps and unmaps one at each call that crosses an
# end, which in tracing is a fifth of the time. A frame that wants a megabyte brings a piece in
# which all frames above it have room.
_roomy.__code__ = _roomy.__code__.replace(co_stacksize=(1 << 17) + 1)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.setup = functools.partial(_roomy, item.setup)
    item.runtest = functools.partial(_roomy, item.runtest)


hypothesis.settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=500, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

import cases  # noqa: E402  (after the devices)

import fftgrad as fg  # noqa: E402  (after the devices)


def pytest_report_header() -> str:
    return (
        f"jax {jax.__version__} with {jax.device_count()} {jax.default_backend()} devices; "
        f"hypothesis profile {hypothesis.settings.get_current_profile_name()}; "
        f"rows by FFTGRAD_SEED={cases.SEED}"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """A worker gets all tests of a row: xdist's own groups get lost with the ids of pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRow(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return cases.group_of(nodeid)

    return ByRow(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order by row: what shares programs runs one after the other. Programs get a time limit."""
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.timeout(LIMIT))
    groups = [cases.group_of(item.nodeid) for item in items]
    first = {group: number for number, group in reversed(list(enumerate(groups)))}
    items.sort(key=lambda item: first[cases.group_of(item.nodeid)])


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees programs where a group ends: a worker would keep all that it ever compiled."""
    ends = nextitem is None or cases.group_of(nextitem.nodeid) != cases.group_of(item.nodeid)
    if _size() > (MOST if ends else 1.2 * MOST):
        _free()


def _size() -> float:
    """Bytes of this process; where the system does not say, too many."""
    pages = pathlib.Path("/proc/self/statm")
    if not pages.exists():
        return math.inf
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _free() -> None:
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", "")).startswith(TESTS):
            for function in vars(module).values():  # which keep programs that they compiled
                getattr(function, "cache_clear", bool)()
    jax.clear_caches()
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):  # or the freed gigabyte stays with the process
        LIBC.malloc_trim(0)


def _for(platform, *args, default, **others):
    return others.get(platform, default)(*args)


@pytest.fixture(scope="session", autouse=True)
def _really_eight_devices() -> None:
    assert jax.device_count() == DEVICES


@pytest.fixture
def examples_are_compiled(monkeypatch):
    """Outside jit each operation is a program, of which examples have thousands."""
    vmap = jax.vmap
    monkeypatch.setattr(jax, "vmap", lambda *args, **kwargs: jax.jit(vmap(*args, **kwargs)))
    for name in ("compress", "decompress"):
        monkeypatch.setattr(fg, name, jax.jit(getattr(fg, name), static_argnums=0))


# For a TPU there are few programs of their own.
@pytest.fixture(
    scope="module", params=[*cases.PLATFORMS[:-1], pytest.param("tpu", marks=cases.SLOW)]
)
def platform(request, _programs_of_this_platform):
    """Runs a test also with the programs that are made for accelerators, on this platform."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "cpu":
            patch.setattr(jax.lax, "platform_dependent", functools.partial(_for, request.param))
        jax.clear_caches()
        yield
    jax.clear_caches()


ALL_BRANCHES = jax.lax.platform_dependent


@pytest.fixture
def every_platform(monkeypatch):
    """Traces the branches for all platforms, in one test."""
    monkeypatch.setattr(jax.lax, "platform_dependent", ALL_BRANCHES)


@pytest.fixture(scope="module", autouse=True)
def _programs_of_this_platform(request):
    """Traces no branch that is for other platforms, a quarter of the time of the suite.

    A module with `EVERY_PLATFORM = True` traces all of them, as it is outside the tests.
    """
    if getattr(request.module, "EVERY_PLATFORM", False):
        jax.clear_caches()
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", functools.partial(_for, "cpu"))
        yield
