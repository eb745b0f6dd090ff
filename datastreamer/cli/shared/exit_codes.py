"""How a program ends: exit codes, one line for an error, signals, closed pipes.

0 done, 1 it failed, 2 wrong usage. Owns what is written to stderr about failures; no
traceback reaches a user. Light to import: the program itself is made under its care.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import shlex
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from datastreamer.cli import early_signals as early
from datastreamer.cli.shared import logs
from datastreamer.cli.shared.console import Rendered
from datastreamer.errors import CommitInDoubt, DamagedFile, DatastreamerError
from datastreamer.printable import PrintableStream, printable_bytes

if TYPE_CHECKING:
    import typer

DONE, FAILED, WRONG_USAGE = 0, 1, 2

_log = logging.getLogger(__name__)

# How often the watcher of a pipe looks whether it is still needed.
_LOOK_MS = 250


class Failure(Exception):
    """A command cannot do what it was asked for; ``str()`` is the line that says so."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where the main thread stands, as Ctrl-C is."""


def run(name: str, program: Callable[[], typer.Typer], arguments: Sequence[str]) -> int:
    """Run the program that `program` makes; gives the exit code and raises nothing."""
    return guard(lambda: _invoke(name, program(), list(arguments)))


def guard(work: Callable[[], int]) -> int:
    """Do `work`, which gives an exit code; whatever it raises becomes one, and a line."""
    watch = _Watch()
    with _standard_streams(), logs.to_stderr(), _signals_raise(watch):
        try:
            try:
                code = work()
                write_raw(b"")
                return code
            except BaseException:
                # Told is what went wrong first.
                try:
                    write_raw(b"")
                except OSError:
                    _discard_stdout()
                raise
            finally:
                _ignore_more()
        except KeyboardInterrupt as error:
            name = "SIGTERM" if isinstance(error, Terminated) else "SIGINT"
            if watch.good_end:
                _log.debug("ended by %s", name)
                return DONE
            logs.say_error("ended by SIGTERM" if name == "SIGTERM" else "interrupted")
            return FAILED
        except BrokenPipeError:
            # Whoever read our output has enough.
            _discard_stdout()
            return DONE
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told in one line
            return _failed(error)
        finally:
            watch.over.set()


def _invoke(name: str, program: typer.Typer, arguments: list[str]) -> int:
    import typer

    # Typer brings its own copy of click or uses click's, by its version; what all errors
    # of usage are is found from one that it names in either.
    usage_error: Any = typer.BadParameter.__mro__[2]
    command = typer.main.get_command(program)
    _loaded()
    try:
        with command.make_context(name, arguments) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except usage_error as error:
        # Where typer has pydantic look at values, it is named in front of what is wrong.
        told = error.format_message().replace(": Value error, ", ": ")
        logs.say_error(_one_line(told))
        if error.ctx is not None:
            logs.say(f"{error.ctx.command_path} -h tells how it is used")
        return WRONG_USAGE
    return DONE


def _failed(error: BaseException) -> int:
    while inner := getattr(error, "exceptions", None):
        # A group of what went wrong in several tasks: the first is the reason.
        error = inner[0]
    if isinstance(error, CommitInDoubt) and (before := _failure_before(error)):
        # The stream was closed after a command had failed, and that failed too.
        logs.say_error(_one_line(str(before)))
    if isinstance(error, DatastreamerError | Failure):
        text = str(error)
        if isinstance(error, DamagedFile) and "restore from a copy" not in text:
            text += f"; `datastreamer verify {shlex.quote(error.path)}` shows all of it"
    elif isinstance(error, OSError):
        what = error.strerror or str(error) or type(error).__name__
        text = f"{os.fsdecode(error.filename)}: {what}" if error.filename else what
    else:
        text = f"a fault of this program: {type(error).__name__}: {error}"
    logs.say_error(_one_line(text))
    _log.debug("where it happened", exc_info=error)
    return FAILED


def _failure_before(error: BaseException) -> Failure | None:
    before = error.__context__
    while before is not None and not isinstance(before, Failure):
        before = before.__context__
    return before


def _one_line(text: str) -> str:
    return " ".join(text.split())


# Standard output.

STDOUT = "standard output"


def write_out(text: bytes) -> None:
    """Write encoded text to standard output, at once, with everything escaped that is not
    printable; what rich drew as it is. A failure names it."""
    if not isinstance(text, Rendered):
        text = printable_bytes(text, sys.stdout.encoding or "utf-8")
    write_raw(text)


def write_raw(data: bytes) -> None:
    """Write bytes to standard output as they are: for formats that are of bytes, or all hex.

    Also where that is unbuffered, as PYTHONUNBUFFERED makes it, and takes a part at a time; and
    where it is a pipe that does not block, of whoever started us: it is waited for.
    """
    rest = memoryview(data)
    try:
        while not _flushed():
            pass
        while rest:
            rest = rest[_taken(rest) :]
        while not _flushed():
            pass
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror, STDOUT) from error


def _taken(data: memoryview) -> int:
    """How many bytes standard output has taken, after a wait where it has no room."""
    try:
        taken = sys.stdout.buffer.write(data)
    except BlockingIOError as full:
        taken = full.characters_written
    if not taken:
        _wait_for_room()
    return taken or 0


def _flushed() -> bool:
    try:
        sys.stdout.flush()
    except BlockingIOError:
        _wait_for_room()
        return False
    return True


def _wait_for_room() -> None:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    poll.poll()


def _discard_stdout() -> None:
    """What is still buffered goes nowhere, and the interpreter's last flush is quiet."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Text is written printable; a stream that was closed before we began takes what is
    written and drops it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    before = sys.stdout, sys.stderr
    # Whatever writes there: help, warnings, a traceback of a thread.
    sys.stdout, sys.stderr = map(PrintableStream, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


# Signals.


class _Watch:
    """What a program under `guard` has said about its end."""

    current: _Watch | None = None

    def __init__(self) -> None:
        self.good_end = False
        self.over = threading.Event()


def _terminate(number: int, frame: FrameType | None) -> None:
    _ignore_more()
    raise Terminated


def _interrupt(number: int, frame: FrameType | None) -> None:
    _ignore_more()
    raise KeyboardInterrupt


def _ignore_more() -> None:
    """Where a signal is the good end, what follows the first, or the work, is undisturbed."""
    if _Watch.current is not None and _Watch.current.good_end:
        for number in early.SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _signals_raise(watch: _Watch) -> Iterator[None]:
    """SIGTERM ends the program where it stands, as SIGINT does.

    Where `early` sees to both they stay with it, until the work says what they are, or has all
    that it needs.
    """
    before, _Watch.current = _Watch.current, watch
    handlers = {number: signal.getsignal(number) for number in early.SIGNALS}
    if handlers[signal.SIGTERM] not in (early.end_at_once, early.fail_at_once):
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        early.restore(handlers)
        _Watch.current = before


def _loaded() -> None:
    """Where signals were an end at once, with a line, they raise from now on."""
    for number, handler in zip(early.SIGNALS, (_interrupt, _terminate), strict=True):
        if signal.getsignal(number) is early.fail_at_once:
            signal.signal(number, handler)


def end_well_on_signal() -> None:
    """From now on SIGINT and SIGTERM are this program's good end, wherever it stands.

    Also where it was started with SIGINT ignored, as shells do with `&`.
    """
    if _Watch.current is not None:
        _Watch.current.good_end = True
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGTERM, _terminate)


def end_with_reader() -> None:
    """From now on the program ends when nobody reads its output, even if it writes none.

    After `end_well_on_signal`, whose signal it uses.
    """
    watch = _Watch.current
    try:
        fd = sys.stdout.fileno()
        if watch is None or not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return
    except (OSError, ValueError):
        return

    def look(over: threading.Event) -> None:
        poll = select.poll()
        poll.register(fd, 0)
        while not over.is_set():
            if poll.poll(_LOOK_MS) and not over.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    name = "watcher of standard output"
    threading.Thread(target=look, args=(watch.over,), name=name, daemon=True).start()
