"""`datastreamer reassemble`: print complete payloads from several producers.

Payloads are written to standard output, all other events to stderr as JSON lines with
"event".
"""

from __future__ import annotations

import os
import pkgutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datastreamer.archive import is_archive
from datastreamer.cli.reassembly_output import (
    described,
    event_line,
    lines_of,
    stats_line,
    stats_table,
)
from datastreamer.cli.shared import logs
from datastreamer.cli.shared.addresses import both_readings, server_address
from datastreamer.cli.shared.console import live_display
from datastreamer.cli.shared.exit_codes import (
    Failure,
    exit_when_output_closes,
    exit_zero_on_signal,
    write_out,
)
from datastreamer.cli.shared.json_input import BadLine, bytes_of
from datastreamer.cli.shared.options import (
    FollowOption,
    Format,
    FromOption,
    FromTimeOption,
    Key,
    ReportOutput,
    SourceOptions,
    fraction_option,
    number_option,
    read_number,
    text_option,
)
from datastreamer.cli.shared.server_options import MetricsOptions
from datastreamer.cli.verbs.cat import NoBatchReadsOption
from datastreamer.cli.verbs.split import MessageTypeOption
from datastreamer.client.upstream import Upstream
from datastreamer.consumer.blocking_reassembly import BlockingReassembly
from datastreamer.consumer.sqlite_store import SqliteStore
from datastreamer.format import TYPE_BOOKMARK, U32_MAX, U64_MAX
from datastreamer.printable import json_text
from datastreamer.reassembly.events import PayloadComplete
from datastreamer.reassembly.orderer import Block
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.selection.times import moment_of
from datastreamer.transport.listeners import metrics_listeners

if TYPE_CHECKING:
    from rich.live import Live

    from datastreamer.consumer.options import Start
    from datastreamer.reassembly.merge import Item, Order

_LOOK_SECONDS = 0.5

SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="Stream files, servers (HOST:PORT, tcps://HOST:PORT with TLS, unix:PATH) or archives "
        "(archive:URL).",
    ),
]
FromBookmarkOption = Annotated[
    str | None,
    text_option(
        "KEY",
        "Begin at this bookmark, 0x... in hex or text; the key of a payload's bookmark is the "
        "first 16 bytes of its id.",
    ),
]
SubscribeOption = Annotated[
    list[str] | None,
    text_option(
        "PREFIX",
        "Receive only messages whose keys have this prefix, 0x... in hex; repeatable [all]. "
        "Nested headers are always received.",
    ),
]
ReorgThresholdOption = Annotated[
    int,
    number_option(
        "N",
        "Remember a delivered payload for N further payloads, to drop late duplicates; with "
        "--order, roll back at most N blocks.",
        most=U32_MAX,
    ),
]
BudgetOption = Annotated[
    int,
    number_option(
        "MIB",
        "Maximum memory for incomplete payloads, in MiB; above it the oldest is dropped.",
        least=1,
        most=1 << 24,
    ),
]
MaxAgeOption = Annotated[
    float,
    fraction_option(
        "SECONDS",
        "With --follow, drop a payload that is incomplete after this time.",
        least=0.001,
        most=1e9,
    ),
]
StoreOption = Annotated[
    str | None, text_option("FILE", "Keep the progress in this database, and resume from it.")
]
OrderOption = Annotated[
    str | None,
    text_option(
        "MODULE:FUNCTION",
        "Print payloads in the order of a chain, and reorgs: the function gets a payload and "
        "returns its Block, or None. The module may be in the current folder.",
    ),
]
AfterOption = Annotated[
    str | None,
    text_option(
        "0xHASH",
        "With --order: the hash of the first block's parent [the first block to arrive is first].",
    ),
]
StatsOption = Annotated[
    bool,
    typer.Option(
        "--stats",
        help="Show statistics by source: on a terminal a live table in place of the payloads, else "
        "JSON lines on stderr.",
    ),
]


def reassemble(
    sources: SourcesArgument,
    *,
    subscribe: SubscribeOption = None,
    start: FromOption = None,
    from_bookmark: FromBookmarkOption = None,
    from_time: FromTimeOption = None,
    follow: FollowOption = False,
    reorg_threshold: ReorgThresholdOption = 1000,
    type: MessageTypeOption = MESSAGE_TYPE,
    no_batch_reads: NoBatchReadsOption = False,
    budget: BudgetOption = 1024,
    max_age: MaxAgeOption = 600.0,
    store: StoreOption = None,
    order: OrderOption = None,
    after: AfterOption = None,
    stats: StatsOption = False,
    output: ReportOutput,
    metrics: MetricsOptions,
    options: SourceOptions,
) -> None:
    """Print payloads that several producers publish in messages.

    Each payload is printed once, when it is complete. A line is {"id": "0x..", "parts":
    [{"key": "0x..", "value": "0x.."}, ...]}. Other events are written to stderr, as JSON lines
    with "event". The command ends when it has read all sources; with --follow it waits for
    later commits, and reconnects to a lost source. With --order a line has also "block":
    {"number": N, "hash": "0x..", "parent": "0x.."}, and a reorg is a line {"rolled_back": [...]},
    followed by the payloads of the other branch.

    Examples:
      datastreamer reassemble a.example.org b.example.org --follow
      datastreamer reassemble a.bin b.bin --subscribe 0x01 --json
    """
    if sum(each is not None for each in (start, from_bookmark, from_time)) > 1:
        raise typer.BadParameter("--from, --from-bookmark and --from-time exclude each other")
    if type == TYPE_BOOKMARK:
        raise typer.BadParameter(f"--type {type} is the entry type of bookmarks")
    if after is not None and order is None:
        raise typer.BadParameter("--after requires --order")
    shape = output.chosen()
    prefixes = None if subscribe is None else [_hex("--subscribe", text) for text in subscribe]
    parent = None if after is None else _hex("--after", after)
    block_of = None if order is None else _imported(order)
    address = metrics.address()
    begin = _start(start, from_bookmark) if from_time is None else moment_of(from_time)
    upstreams = _upstreams(sources, options)
    if follow:
        exit_zero_on_signal()
    with both_readings(*sources), ExitStack() as stack:
        kept = None if store is None else stack.enter_context(SqliteStore(store))
        payloads = stack.enter_context(
            BlockingReassembly(
                upstreams,
                subscribe=prefixes,
                batch_reads=not no_batch_reads,
                store=kept,
                order=block_of,
                after=parent,
                on_event=lambda event: logs.say_verbatim(event_line(event)),
                follow=follow,
                start=begin,
                type=type,
                reorg_threshold=reorg_threshold,
                budget=budget << 20,
                max_age=max_age,
                stream_type=options.stream_type,
            )
        )
        if address is not None:
            stack.enter_context(_metrics(payloads, *address))
        if follow:
            exit_when_output_closes()
        live = stack.enter_context(live_display()) if stats and sys.stdout.isatty() else None
        _print_all(payloads, shape, stats, live)
    _report_end(payloads)


def _print_all(
    payloads: BlockingReassembly[Item], shape: Format, stats: bool, live: Live | None
) -> None:
    due = time.monotonic()
    while not payloads.over:
        item = payloads.next(_LOOK_SECONDS if stats else None)
        if item is not None and live is None:
            write_out(described(item) if shape == "table" else lines_of(item))
        if stats and (payloads.over or time.monotonic() >= due):
            found = payloads.stats, payloads.sources, payloads.oldest_seconds
            if live is None:
                logs.say_verbatim(stats_line(*found))
            else:
                live.update(stats_table(*found), refresh=True)
            due = time.monotonic() + _LOOK_SECONDS


def _report_end(payloads: BlockingReassembly[Item]) -> None:
    stats = payloads.stats
    if stats.in_flight:
        event = {"event": "unfinished", "in_flight": stats.in_flight, "messages": stats.messages}
        logs.say_verbatim(json_text(event))
    for name, error in payloads.errors.items():
        raise Failure(f"{name} was not read to its end: {error}")


def _hex(option: str, text: str) -> bytes:
    try:
        return bytes_of(text)
    except BadLine as error:
        raise typer.BadParameter(f"{option}: {error}") from None


# What a function of the user may raise, whose end is not the command's.
_USERS = (Exception, SystemExit, GeneratorExit)


def _imported(name: str) -> Order:
    """The function MODULE:FUNCTION; errors of it are a `Failure`."""
    if ":" not in name:
        raise typer.BadParameter(f"--order {name}: write MODULE:FUNCTION")
    # The module may import others of its folder later; files there hide no module of ours.
    before = sys.path[:]
    try:
        here = os.getcwd()
        sys.path.insert(0, here)
        found = pkgutil.resolve_name(name)
    except _USERS as error:
        why = f"{error.__class__.__name__}: {error}"
        raise typer.BadParameter(f"--order {name} cannot be imported: {why}") from error
    sys.path[:] = [*before, here]
    if not callable(found):
        raise typer.BadParameter(f"--order {name} is not a function")

    def block_of(payload: PayloadComplete) -> Block | None:
        which = f"--order {name}, payload 0x{payload.id.hex()}"
        try:
            block = found(payload)
        except _USERS as error:
            raise Failure(f"{which}: {error.__class__.__name__}: {error}") from error
        match block:
            case Block() if block.hash == block.parent:
                raise Failure(f"{which}: the block is its own parent")
            case None | Block(int(), bytes(), bytes(), None | int()):
                return block
        raise Failure(f"{which}: it returned {block!r}, which is neither a Block nor None")

    return block_of


def _start(start: str | None, bookmark: str | None) -> Start:
    if bookmark is not None:
        # The keys of blocks and batches depend on the stream version; streams may differ in it.
        if bookmark.startswith(("block:", "batch:")):
            raise typer.BadParameter(
                f"--from-bookmark {bookmark}: write the key of a payload in hex"
            )
        return Key(bookmark).of(0)
    if start == "latest":
        return "latest"
    return 0 if start is None else read_number(start, U64_MAX, "--from")


def _upstreams(sources: list[str], options: SourceOptions) -> dict[str, Upstream | Path | str]:
    addresses = [server_address(text) for text in sources]
    servers = [address for address in addresses if address is not None]
    upstreams = iter(options.upstreams(servers, sources[0]))
    found: dict[str, Upstream | Path | str] = {}
    for text, address in zip(sources, addresses, strict=True):
        place: Upstream | Path | str = Path(text) if address is None else next(upstreams)
        if is_archive(text):
            place = text
        elif address is None and not os.path.lexists(text):
            raise Failure(f"{text}: no such file")
        name = place.name if isinstance(place, Upstream) else text
        if name in found:
            raise typer.BadParameter(f"{text!r} is named twice")
        found[name] = place
    return found


@contextmanager
def _metrics(
    payloads: BlockingReassembly[Item], hosts: list[str] | None, port: int
) -> Iterator[None]:
    """Serve metrics within the block."""
    from datastreamer.metrics.exposition import MetricsSnapshot
    from datastreamer.server.metrics import of_process
    from datastreamer.service.parent_metrics import GatheredMetrics

    def ask(limit: int) -> MetricsSnapshot:
        metrics = of_process()
        metrics["samples"].update(payloads.samples())
        return metrics

    listeners = metrics_listeners(hosts, port)
    try:
        with closing(GatheredMetrics(listeners, ask, lambda: "")):
            yield
    finally:
        for listener in listeners:
            listener.close()
