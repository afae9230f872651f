"""Processes that are made quickly."""

import multiprocessing

import pytest


@pytest.fixture
def forked_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contestant's process is forked from a server that has imported what it needs, and does not import it again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pmae.train.loop", "benchmarks.contestant"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
