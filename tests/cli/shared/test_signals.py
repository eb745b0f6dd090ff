"""Stop requests by signal, at any moment."""

from __future__ import annotations

import random
import signal

import pytest

from datastreamer.cli.shared.signals import StopRequest


def test_it_remains_set() -> None:
    with StopRequest(signals=[signal.SIGALRM, signal.SIGUSR1]) as ending:
        assert not ending.is_set()
        assert not ending.wait(0)
        assert not ending.wait(-1)
        assert not ending.wait(0.001)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGALRM)
        assert ending.is_set()
    assert ending.wait(0)
    assert ending.wait(1e12)


def test_another_signal_ends_no_wait() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        with StopRequest(signals=[signal.SIGUSR1]) as ending:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            while not heard:
                assert not ending.wait(0.01)
            assert not ending.wait(0.01)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_signal_may_come_anywhere_in_a_wait() -> None:
    """Also while a lock would be held, or just before poll(2) is called."""
    choose = random.Random(1)
    for _ in range(20_000):
        with StopRequest(signals=[signal.SIGALRM]) as ending:
            signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-6, 4e-5))
            assert ending.wait(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_ask_for_the_end(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as ending:
        assert not ending.is_set()
        signal.raise_signal(number)
        assert ending.wait(60)
    assert signal.getsignal(number) is before
