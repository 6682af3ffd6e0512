"""pytest's plug-in of torch-symm: ``@pytest.mark.ranks(4)`` runs a test's body on that many processes.

A separate module, because pytest imports it at every start, and ``torch_symm`` would import torch. Until a marked test
runs, it imports only pytest and does nothing. ``docs/guide/testing.md`` describes its use.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pytest

#: The usage of the mark.
_USAGE = "ranks(n, *, backend='symm', timeout=60, group_timeout=0.75 * timeout, env=None): n is a number or a list"
_COUNT = "_number_of_ranks"
_WARM = pytest.StashKey[Any]()


class _RankLater:
    """Replaces the rank in the process from which ranks are forked."""

    def __index__(self) -> NoReturn:
        raise RuntimeError(f"{self!r}: fixtures are made once, before ranks are forked; only the test has a rank")

    __int__ = __index__

    def __repr__(self) -> str:
        return "rank of a test that has not begun"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line("markers", f"{_USAGE}; the test's body runs on n processes of one torch.distributed group")


def settings(item: Any) -> dict[str, Any] | None:
    """The mark's arguments, checked: ``counts``, ``backend``, ``timeout``, ``group_timeout``, ``env``.

    Returns ``None`` for a test without the mark.

    Raises:
        pytest.UsageError: the mark is written wrongly.
    """
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None

    def read(n: Any = None, *, ranks: Any = None, backend: Any = "symm", timeout: float = 60.0, **rest: Any) -> Any:
        counts = n if ranks is None else ranks
        counts = list(counts) if isinstance(counts, Sequence) and not isinstance(counts, str) else [counts]
        if (n is not None and ranks is not None) or not counts or not all(type(c) is int and c > 0 for c in counts):
            raise TypeError("n must be a positive number of ranks, or a list of such")
        limit, env = rest.pop("group_timeout", 0.75 * timeout), rest.pop("env", None)
        if env is not None and not (
            isinstance(env, Mapping) and all(isinstance(text, str) for pair in env.items() for text in pair)
        ):
            raise TypeError(f"env must map strings to strings, not {env!r}")
        if rest:
            raise TypeError(f"unknown: {', '.join(rest)}")
        return {"counts": counts, "backend": backend, "timeout": timeout, "group_timeout": limit, "env": env}

    try:
        found: dict[str, Any] = read(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}; the mark is {_USAGE}") from None
    return found


def number_of_ranks(item: Any) -> int:
    """The number of ranks of a marked test."""
    given = settings(item)
    assert given is not None
    callspec = getattr(item, "callspec", None)
    chosen = callspec.params.get(_COUNT) if callspec else None
    count: int = chosen or given["counts"][0]
    return count


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test for each number of ranks that the mark lists."""
    given = settings(metafunc.definition)
    if given and len(given["counts"]) > 1:
        metafunc.fixturenames.append(_COUNT)
        metafunc.parametrize(_COUNT, given["counts"], ids=[f"{count}-ranks" for count in given["counts"]])


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks of this test."""
    if settings(request.node) is None:
        raise pytest.UsageError(f"{request.node.nodeid}: world_size is for tests with @pytest.mark.ranks(n)")
    return number_of_ranks(request.node)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """The rank of the process that runs the test's body."""
    if settings(request.node) is None:
        raise pytest.UsageError(f"{request.node.nodeid}: rank is for tests with @pytest.mark.ranks(n)")
    return _RankLater()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Forks the process in which marked tests run, before any test has changed this one."""
    options = session.config.option
    marked = any(item.get_closest_marker("ranks") for item in getattr(session, "items", []))
    if marked and not options.collectonly and not options.usepdb:
        from torch_symm.testing._warm import WarmProcess

        session.stash[_WARM] = WarmProcess(session)
        session.stash[_WARM].start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    """Runs a marked test in the warm process, and reports its outcome."""
    warm = item.session.stash.get(_WARM, None)
    if warm is None or item.get_closest_marker("ranks") is None:
        return None
    if warm.inside:
        from torch_symm.testing._warm import protocol

        return protocol(item, nextitem)
    later = item.session.items[item.session.items.index(item) + 1 :]
    following = next((other for other in later if other.get_closest_marker("ranks")), None)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in warm.run(item, following):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends the warm process."""
    warm = session.stash.get(_WARM, None)
    if warm is not None and not warm.inside:
        warm.stop()
        del session.stash[_WARM]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Rejects tests that cannot run on ranks."""
    if item.get_closest_marker("ranks") is None:
        warm = item.session.stash.get(_WARM, None)
        if warm is not None and not warm.inside:
            # End the fixtures that pytest kept for marked tests, because those have their own in the warm process.
            item.session._setupstate.teardown_exact(item)
        return
    if not isinstance(item, pytest.Function) or (item.cls and hasattr(item.cls, "assertRaises")):
        message = "unittest's classes have no @pytest.mark.ranks: take torch_symm.testing.WarmMultiProcessTestCase"
        raise pytest.UsageError(f"{item.nodeid}: {message}")
    if any("raises" in mark.kwargs for mark in item.iter_markers("xfail")):
        message = "@pytest.mark.ranks does not know the type of a rank's error: use pytest.raises in the test"
        raise pytest.UsageError(f"{item.nodeid}: xfail with raises: {message}")
    if inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj):
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.ranks runs no coroutine: call asyncio.run in the test")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the body of a marked test on ranks, which are forked once all its fixtures exist."""
    given = settings(pyfuncitem)
    if given is None:
        return None
    from torch_symm.testing import _case

    wanted = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    _case.run(pyfuncitem, arguments, _RankLater, number_of_ranks(pyfuncitem), given)
    return True
