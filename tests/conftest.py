"""Eight CPU devices, strict promotion, and hypothesis profiles; before any test imports JAX."""

import getpass
import os
import pathlib
import tempfile

DEVICES = 8
# The devices share one pool of threads: where all of its threads wait in a collective, nothing is
# left to compute what they wait for. The default size is the number of cores.
os.environ.setdefault("PJRT_NPROC", str(4 * DEVICES))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else they block each other in LAPACK

import hypothesis  # noqa: E402  (after the setting)
import jax  # noqa: E402  (after the setting)
import pytest  # noqa: E402  (after the setting)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
# The suite is thousands of small programs that run once: it waits for the compiler.
jax.config.update("jax_disable_most_optimizations", True)
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if jax.__version_info__ < (0, 11):  # half of the time; later versions end at flags they do not know
    QUICK += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"
# A worker has what the others compiled, and a run what the last one did, in any checkout.
if not jax.config.jax_compilation_cache_dir:  # JAX_COMPILATION_CACHE_DIR
    cache = f"fftgrad-tests-{getpass.getuser()}-{jax.__version__}"
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(tempfile.gettempdir()) / cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

hypothesis.settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=500, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

from layers import (  # noqa: E402, F401  (hooks of pytest)
    PROGRAMS,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_report_header,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from platforms import (  # noqa: E402, F401  (fixtures)
    _programs_of_this_platform,
    every_platform,
    platform,
)

import fftgrad as fg  # noqa: E402  (after the devices)

MOST = 200
"""Programs after which a worker frees them: it would keep all that it ever compiled."""


@pytest.fixture(scope="module", autouse=True)
def _few_programs():
    """A module begins with few programs in memory."""
    yield
    if PROGRAMS["compiled"] - PROGRAMS["freed"] > MOST:
        jax.clear_caches()
        PROGRAMS["freed"] = PROGRAMS["compiled"]


@pytest.fixture
def examples_are_compiled(monkeypatch):
    """Outside jit each operation is a program, of which examples have thousands."""
    vmap = jax.vmap
    monkeypatch.setattr(jax, "vmap", lambda *args, **kwargs: jax.jit(vmap(*args, **kwargs)))
    for name in ("compress", "decompress"):
        monkeypatch.setattr(fg, name, jax.jit(getattr(fg, name), static_argnums=0))
