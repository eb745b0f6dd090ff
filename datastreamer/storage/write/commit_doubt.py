"""Doubt about a commit at the end of a block: raised, but never in place of Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from datastreamer.errors import CommitInDoubt, FileReplaced

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def raised_after(error: BaseException | None) -> Iterator[None]:
    """For an ``__exit__`` with `error`: let what the stream raises through.

    It has `error` as its context. An `error` that is no `Exception` (Ctrl-C, a cancelled task,
    the end of the process) must not be replaced: then the doubt is logged.
    """
    try:
        yield
    except (CommitInDoubt, FileReplaced) as doubt:
        if error is None or isinstance(error, Exception):
            raise
        _log.error("%s", doubt)
