"""The steps that an engine yields to its driver: one small input or output at a time.

An engine is written once, as generators that yield these effects and are sent the results. A
driver performs them under Trio, under asyncio, or in a plain thread; an effect that fails, or is
cancelled, is raised in the generator, which decides what follows. Must not know sockets,
tasks or clocks.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from datastreamer.transport.endpoint import Endpoint

T = TypeVar("T")
P = ParamSpec("P")

Channel: TypeAlias = Any
"""A connection that its driver made: engines only pass it back to the driver."""


class Interrupted(Exception):
    """`Interrupt` ended this wait."""


class Signal(Protocol):
    """An event of the driver's kind: tasks wait until it is set."""

    def set(self) -> object: ...
    def is_set(self) -> bool: ...


@dataclass(slots=True)
class Connect:
    """Make another connection, to this one of the driver's servers: gives a `Channel`. Raises
    `ConnectFailed` after `seconds`."""

    seconds: float
    server: int = 0


@dataclass(slots=True)
class Open:
    """Connect, with TLS but without a token: gives a `Channel`. A step of `Connect`; raises
    `ConnectFailed`, and `TLSFailed` if the handshake fails."""

    seconds: float
    server: int = 0


@dataclass(slots=True)
class Send:
    """Send all of `data`. Raises `TimeoutError` after `seconds` (None: no limit)."""

    channel: Channel
    data: bytes
    seconds: float | None = None


@dataclass(slots=True)
class Receive:
    """Wait for bytes: gives their number, 0 at the end of the connection. Raises `TimeoutError`
    after `seconds` (None: no limit). A cancelled `Receive` consumes nothing."""

    channel: Channel
    buffer: memoryview
    seconds: float | None = None


@dataclass(slots=True)
class Close:
    """Close the connection, even during a cancellation. Without `farewell`, TLS sends no close: in
    a forked child the connection is still the parent's."""

    channel: Channel
    farewell: bool = True


@dataclass(slots=True)
class Interrupt:
    """End the wait of another task or thread: a `Sleep` or `Connect` raises `Interrupted`, and a
    `Receive` on `channel` returns 0."""

    channel: Channel | None


@dataclass(slots=True)
class Now:
    """Gives the seconds on the driver's clock."""


@dataclass(slots=True)
class Sleep:
    """Wait until this time on the driver's clock."""

    until: float


@dataclass(slots=True)
class Wait:
    """Wait until the signal is set. Raises `TimeoutError` after `seconds` (None: no limit)."""

    signal: Any
    seconds: float | None = None


@dataclass(slots=True)
class Call:
    """Call a user's function; gives its result, awaited if that can be awaited."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(slots=True)
class InThread:
    """Call a function that may block; cancellation waits until it returns."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(slots=True)
class Beside:
    """Perform these where the driver's background runs, by `driver` if one is named: gives their
    outcome."""

    steps: Steps[Any]
    driver: AsyncDriver | None = None


@dataclass(slots=True)
class CancellationPoint:
    """Raise the caller's cancellation, if the driver can report it without a wait."""


@dataclass(slots=True)
class Race:
    """Perform all of these at the same time until one ends; the others are cancelled then.
    Raises the error of the first racer that failed."""

    racers: tuple[Steps[None], ...]


Effect: TypeAlias = (
    Connect
    | Open
    | Send
    | Receive
    | Close
    | Interrupt
    | Now
    | Sleep
    | Wait
    | Call
    | InThread
    | Beside
    | CancellationPoint
    | Race
)
Steps: TypeAlias = Generator[Effect, Any, T]


class Turn(Protocol):
    """A lock that is never waited for, so that a signal's handler may try it too."""

    def acquire(self, blocking: bool = ...) -> bool: ...
    def release(self) -> None: ...


class Driver(ABC):
    """The part of a driver that an engine uses; it connects to these servers."""

    turn: Turn
    """The engine's lock."""

    cancelled: tuple[type[BaseException], ...] = ()
    """What is raised where a wait is cancelled."""

    guard: AbstractContextManager[object] = nullcontext()
    """Held by what the caller's steps and the background's both change."""

    threaded = False
    """Whether others that use the engine are threads, which may not touch a connection that is in
    use."""

    def __init__(self, *servers: Any) -> None:
        self.servers = servers

    @property
    def reconnects(self) -> bool:
        """Whether it can perform `Connect`."""
        return bool(self.servers)

    @abstractmethod
    def signal(self) -> Signal:
        """A new `Signal`."""

    @abstractmethod
    def now(self) -> float:
        """The seconds on its clock."""

    def soon(self, function: Callable[[], object]) -> None:
        """Call `function` where the background runs, without waiting for that."""
        function()

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` where the background runs."""
        function()


class AsyncDriver(Driver):
    """Runs an engine's steps in the caller's task."""

    async def run(self, steps: Steps[T]) -> T:
        """Perform the effects of `steps`, and return its outcome."""
        result: Any = None
        failure: BaseException | None = None
        while True:
            try:
                while True:
                    effect = steps.send(result) if failure is None else steps.throw(failure)
                    failure = None
                    # Most effects, without a call between.
                    if type(effect) is Receive and effect.seconds is None:
                        result = await effect.channel.receive_into(effect.buffer)
                    elif type(effect) is Send and effect.seconds is None:
                        result = await effect.channel.send(effect.data)
                    elif type(effect) is Beside:
                        result = await (effect.driver or self).run(effect.steps)
                    else:
                        result = await self.perform(effect)
            except StopIteration as done:
                outcome: T = done.value
                return outcome
            except BaseException as error:
                if getgeneratorstate(steps) == GEN_CLOSED:
                    raise
                failure = self.plain(error)

    def plain(self, error: BaseException) -> BaseException:
        """What an effect raised, as one of `cancelled` if it is no more than a cancellation."""
        return error

    @abstractmethod
    async def perform(self, effect: Effect) -> Any:
        """Perform one effect."""

    @abstractmethod
    def background(self, *steps: Steps[None]) -> AbstractAsyncContextManager[None]:
        """Perform these beside the block, whose end cancels them. The block raises nothing."""


class DriverTo(Protocol):
    """Makes a driver that connects to these servers."""

    def __call__(self, *endpoints: Endpoint) -> AsyncDriver: ...


def opener(
    made: Callable[Concatenate[DriverTo, P], T], driver_to: DriverTo, name: str, module: str
) -> Callable[P, T]:
    """The class `made` as the function `name` of a module, for drivers of one event loop: with the
    other options and the documentation of its constructor."""

    def opened(*arguments: P.args, **options: P.kwargs) -> T:
        return made(driver_to, *arguments, **options)

    signature = inspect.signature(made)
    parameters = list(signature.parameters.values())[1:]
    opened.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    opened.__doc__ = made.__init__.__doc__
    opened.__name__ = opened.__qualname__ = name
    opened.__module__ = module
    return opened
