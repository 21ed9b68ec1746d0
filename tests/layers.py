"""The layers of the suite: the default one takes minutes, `--full` runs all that is not slow."""

import collections
import hashlib

import cases
import hypothesis
import jax
import pytest

PROGRAMS = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: PROGRAMS.update(["compiled"] if "backend_compile" in event else [])
)
BY_TEST = collections.Counter()
"""Programs that each test compiled, all of its cases together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all that is not slow")
    parser.addoption("--rest", action="store_true", help="run what the default layer leaves of it")


def pytest_report_header() -> str:
    return (
        f"jax {jax.__version__} with {jax.device_count()} {jax.default_backend()} devices; "
        f"hypothesis profile {hypothesis.settings.get_current_profile_name()}; "
        f"rows by FFTGRAD_SEED={cases.SEED}"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The layer, in the order of rows: what shares programs runs one after the other."""
    option = config.option
    chosen = option.keyword or option.markexpr or any("::" in name for name in config.args)
    if option.rest or not chosen:
        taken = set(full_layer(items) if option.full or option.rest else default_layer(items))
        taken -= set(default_layer(items)) if option.rest else set()
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = [item for item in items if item in taken]
    groups = [cases.group_of(item.nodeid) for item in items]
    first = {group: number for number, group in reversed(list(enumerate(groups)))}
    items.sort(key=lambda item: first[cases.group_of(item.nodeid)])


def full_layer(items: list[pytest.Item]) -> list[pytest.Item]:
    """All tests that are not slow."""
    return [item for item in items if not item.get_closest_marker("slow")]


def default_layer(items: list[pytest.Item]) -> list[pytest.Item]:
    """Select every case of laws and oracles, the smoke tests, and one case of each other test."""
    tests = collections.defaultdict(list)
    for item in full_layer(items):
        if item.get_closest_marker("full"):
            continue
        if not item.get_closest_marker("processes") or item.get_closest_marker("smoke"):
            every = item.get_closest_marker("every_case")
            tests[item.nodeid if every else item.nodeid.partition("[")[0]].append(item)
    return [min(own, key=_draw) for own in tests.values()]


def _draw(item: pytest.Item) -> bytes:
    return hashlib.sha256(f"{cases.SEED} {item.nodeid}".encode()).digest()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    before = PROGRAMS["compiled"]
    result = yield
    BY_TEST[item.nodeid.partition("[")[0]] += PROGRAMS["compiled"] - before
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["programs"] = PROGRAMS["compiled"], dict(BY_TEST)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    compiled, by_test = getattr(node, "workeroutput", {}).get("programs", (0, {}))
    PROGRAMS["compiled"] += compiled
    BY_TEST.update(by_test)


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"{PROGRAMS['compiled']} programs were compiled")
    for test, count in BY_TEST.most_common(3):
        terminalreporter.write_line(f"{count:6} by {test}")
