"""Signals whose exception gets lost in a callback."""

from __future__ import annotations

import signal
import threading
import weakref

import pytest

from datastreamer.cli.shared.exit_codes import (
    Failure,
    cancel_on_signal,
    guard,
    raise_if_signalled,
)


class Referred:
    """What a callback waits for the end of."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_cancelled_says_so(
    number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cancelled = threading.Event()

    def work() -> int:
        cancel_on_signal(cancelled.set)
        raise_if_signalled()
        referred = Referred()
        seen = weakref.ref(referred, lambda _: signal.raise_signal(number))
        del referred
        assert seen() is None
        # The exception is lost, and the work goes on until its next step fails.
        assert cancelled.wait(60)
        raise_if_signalled()
        raise Failure("the work failed")

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert guard(work) == code
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert "the work failed" not in capfd.readouterr().err
