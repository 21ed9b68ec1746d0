"""Fixtures that say for which platforms a test traces programs: this one, another, or all."""

import functools

import cases
import jax
import pytest


def _for(platform, *args, default, **others):
    return others.get(platform, default)(*args)


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
