"""How a program ends: exit codes, one line for an error, signals, closed pipes.

0 success, 1 failure, 2 wrong usage, 3 damage; 130 or 143: SIGINT or SIGTERM ended the work. Owns
what is written to stderr about failures; users see no traceback. Light to import: the program
itself is loaded within `run`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import shlex
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from datastreamer.cli import early_signals
from datastreamer.cli.shared import logs
from datastreamer.cli.shared.console import Rendered
from datastreamer.errors import CommitInDoubt, DamagedArchive, DamagedFile, DatastreamerError
from datastreamer.printable import PrintableStream, printable_bytes

if TYPE_CHECKING:
    import typer

SUCCESS, FAILED, WRONG_USAGE, DAMAGED = 0, 1, 2, 3

_log = logging.getLogger(__name__)

_OUTPUT_CHECK_MS = 250


class Failure(Exception):
    """A command failed; ``str()`` is the error line."""

    code = FAILED


class DamageFound(Failure):
    """A command did its work, and damage was found or is left; entries may be lost."""

    code = DAMAGED


class WorkInterrupted(Failure):
    """A signal ended the work of a command, which says what is done."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.code = early_signals.code(number)


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread as SIGINT is."""


def interruption(number: int) -> KeyboardInterrupt:
    """The exception that reports a signal."""
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """The signal that an exception reports."""
    return signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT


def run(name: str, program: Callable[[], typer.Typer], arguments: Sequence[str]) -> int:
    """Run the program that `program` returns; returns the exit code and raises nothing."""
    return guard(lambda: _invoke(name, program(), list(arguments)))


def guard(work: Callable[[], int]) -> int:
    """Do `work`, which returns an exit code; turn what it raises into a line and a code."""
    state = _RunState()
    with _standard_streams(), logs.to_stderr(), _signals_raise(state):
        try:
            try:
                code = work()
                write_raw(b"")
                return code
            except BaseException:
                # The error of the work is the one to report.
                try:
                    write_raw(b"")
                except OSError:
                    _discard_stdout()
                raise
            finally:
                _ignore_further_signals()
        except KeyboardInterrupt as error:
            number = signal_of(error)
            if state.signal_expected:
                _log.debug("ended by %s", number.name)
                return SUCCESS
            where = "".join(getattr(error, "__notes__", ()))
            logs.say_error(early_signals.reason(number) + where)
            return early_signals.code(number)
        except BrokenPipeError:
            # The reader of our output has closed it, as `| head` does.
            _discard_stdout()
            return SUCCESS
        except Exception as error:  # noqa: BLE001 - every error becomes one line
            return _report(error)
        finally:
            state.over.set()


def _invoke(name: str, program: typer.Typer, arguments: list[str]) -> int:
    import typer

    # Typer has its own copy of click or uses click's, by its version: the base class of all
    # usage errors is found from one that it names in either.
    usage_error: Any = typer.BadParameter.__mro__[2]
    command = typer.main.get_command(program)
    _raise_from_now_on()
    try:
        with command.make_context(name, arguments) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except usage_error as error:
        # If typer validates with pydantic, its message names pydantic's error class.
        text = error.format_message().replace(": Value error, ", ": ")
        if re.fullmatch(r"No such option: -\d+", text):
            text += " (numbers are not negative)"
        logs.say_error(_one_line(text))
        if error.ctx is not None:
            logs.say(f"run {error.ctx.command_path} -h for help")
        return WRONG_USAGE
    return SUCCESS


def _report(error: BaseException) -> int:
    while inner := getattr(error, "exceptions", None):
        # Of a group of errors from several tasks, the first is the cause.
        error = inner[0]
    if isinstance(error, CommitInDoubt) and (before := _failure_before(error)):
        # The command failed, and then closing the stream failed too.
        logs.say_error(_one_line(str(before)))
    if isinstance(error, DatastreamerError | Failure):
        # Commands have no option for that; those that need no index work without.
        text = str(error).removesuffix("; or open the stream with index='memory'")
        if isinstance(error, DamagedFile) and "restore from a copy" not in text:
            text += f"; `datastreamer verify {shlex.quote(error.path)}` lists all damage"
    elif isinstance(error, OSError):
        what = error.strerror or str(error) or type(error).__name__
        text = f"{os.fsdecode(error.filename)}: {what}" if error.filename else what
    elif isinstance(error, ModuleNotFoundError) and f"{error.name}".startswith("datastreamer."):
        text = f"{error.name} is not compiled: `make core` compiles a checkout"
    else:
        text = f"internal error: {type(error).__name__}: {error}"
    logs.say_error(_one_line(text))
    _log.debug("traceback", exc_info=error)
    if isinstance(error, DamagedArchive):
        return DAMAGED
    return error.code if isinstance(error, Failure) else FAILED


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
    """Write encoded text to standard output at once; what is not printable is escaped, except
    in what rich rendered."""
    if not isinstance(text, Rendered):
        text = printable_bytes(text, sys.stdout.encoding or "utf-8")
    write_raw(text)


def write_raw(data: bytes) -> None:
    """Write bytes to standard output as they are: for binary formats, and for hex.

    Raises `OSError` that names standard output.
    """
    rest = memoryview(data)
    try:
        sys.stdout.flush()
        while rest:
            # With PYTHONUNBUFFERED a write may be partial.
            rest = rest[sys.stdout.buffer.write(rest) :]
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror, STDOUT) from error


def _discard_stdout() -> None:
    """Drop what is still buffered, so that the interpreter's last flush succeeds."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Make text printable, replace streams that were closed, and make pipes block."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    before = sys.stdout, sys.stderr
    # Also what other code writes: help, warnings, the traceback of a thread.
    sys.stdout, sys.stderr = map(PrintableStream, before)
    unblocked = []
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            if not os.get_blocking(fd):
                # A parent process that shares the pipe has set it so.
                os.set_blocking(fd, True)
                unblocked.append(fd)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for fd in unblocked:
            with contextlib.suppress(OSError):
                os.set_blocking(fd, False)


# Signals.


class _RunState:
    """How the program under `guard` may end."""

    current: _RunState | None = None

    def __init__(self) -> None:
        self.signal_expected = False
        self.signalled: int | None = None
        self.cancel: Callable[[], object] | None = None
        self.over = threading.Event()


def _interrupt(number: int, frame: FrameType | None) -> None:
    _ignore_further_signals()
    if (state := _RunState.current) is not None:
        state.signalled = number
        if state.cancel is not None:
            # In a thread of its own: this one may be within a call of what it cancels.
            threading.Thread(target=state.cancel, daemon=True).start()
    raise interruption(number)


def _ignore_further_signals() -> None:
    """If a signal is the normal end, later ones do not disturb the clean-up."""
    if _RunState.current is not None and _RunState.current.signal_expected:
        for number in early_signals.SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _signals_raise(state: _RunState) -> Iterator[None]:
    """SIGTERM raises an exception, as SIGINT does.

    While `early_signals` handles both, it does so until the command is loaded or says what a
    signal means.
    """
    before, _RunState.current = _RunState.current, state
    handlers = {number: signal.getsignal(number) for number in early_signals.SIGNALS}
    if handlers[signal.SIGTERM] not in (early_signals.exit_zero, early_signals.exit_failed):
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        early_signals.restore(handlers)
        _RunState.current = before


def _raise_from_now_on() -> None:
    """The program is loaded: signals that failed it at once raise exceptions now."""
    for number in early_signals.SIGNALS:
        if signal.getsignal(number) is early_signals.exit_failed:
            signal.signal(number, _interrupt)


def cancel_on_signal(cancel: Callable[[], object]) -> None:
    """From now on SIGINT and SIGTERM also call this, in a thread.

    For work of another program whose callbacks lose the exception that a signal raises: the work
    fails when it is cancelled, and `raise_if_signalled` says which signal it was.
    """
    if _RunState.current is not None:
        _RunState.current.cancel = cancel
        for number in early_signals.SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _interrupt)


def raise_if_signalled() -> None:
    """Raise the exception of the signal that has arrived, if one has."""
    if _RunState.current is not None and _RunState.current.signalled is not None:
        raise interruption(_RunState.current.signalled)


def exit_zero_on_signal() -> None:
    """From now on SIGINT and SIGTERM are the normal end of this program, with exit code 0.

    Also if it was started with SIGINT ignored, as shells do with `&`.
    """
    if _RunState.current is not None:
        _RunState.current.signal_expected = True
        for number in early_signals.SIGNALS:
            signal.signal(number, _interrupt)


def exit_when_output_closes() -> None:
    """From now on the program ends when the reader closes its output, even if it writes nothing.

    A thread sends SIGTERM.
    """
    state = _RunState.current
    try:
        fd = sys.stdout.fileno()
        if state is None or not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return
    except (OSError, ValueError):
        return

    def check(over: threading.Event) -> None:
        poll = select.poll()
        poll.register(fd, 0)
        while not over.is_set():
            if poll.poll(_OUTPUT_CHECK_MS) and not over.is_set():
                state.signal_expected = True
                # SIGINT may be ignored.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                return

    name = "standard output watch"
    threading.Thread(target=check, args=(state.over,), name=name, daemon=True).start()
