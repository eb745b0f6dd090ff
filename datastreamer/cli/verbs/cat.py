"""`datastreamer cat`: print entries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Literal

import typer

from datastreamer.cli.shared.decoded import Decoded
from datastreamer.cli.shared.exit_codes import (
    Failure,
    exit_when_output_closes,
    exit_zero_on_signal,
    write_out,
    write_raw,
)
from datastreamer.cli.shared.options import (
    EntryOutput,
    FollowOption,
    FromOption,
    FromTimeOption,
    Key,
    SourceOptions,
    StreamArgument,
    StreamVersionOption,
    fraction_option,
    number_option,
    read_number,
    read_type,
    text_option,
)
from datastreamer.cli.shared.output import form_of
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.source import named_not_found, open_source
from datastreamer.errors import HistoryChanged, UsageError
from datastreamer.format import U64_MAX
from datastreamer.selection.clauses import Selection, with_prefixes

LastOption = Annotated[int | None, number_option("N", "Begin N entries before the head.")]
FromBookmarkOption = Annotated[
    str | None,
    text_option("KEY", "Begin at this bookmark: 0x... in hex, block:N, batch:N, or text."),
]
ToOption = Annotated[int | None, number_option("N", "Last entry, included [the head].")]
ToBookmarkOption = Annotated[
    str | None, text_option("KEY", "Last entry: that of this bookmark, included.")
]
CountOption = Annotated[int | None, number_option("N", "Print at most N entries.")]
TypeOption = Annotated[
    list[str] | None,
    text_option(
        "T", "Only entries of this type, decimal or 0x...; repeatable [all].", name="--type"
    ),
]
PrefixOption = Annotated[
    list[str] | None,
    text_option(
        "[OFFSET:]0xHEX",
        "Of each --type, only entries whose data has these bytes at OFFSET [0]; repeatable.",
        name="--prefix",
    ),
]
TimeoutOption = Annotated[
    float | None,
    fraction_option(
        "SECONDS",
        "If a server sends nothing for this time, probe it, and give up if it does not answer "
        "[10; with --follow: no probes].",
        least=0.001,
        most=1e6,
    ),
]
NoBatchReadsOption = Annotated[
    bool,
    typer.Option(
        "--no-batch-reads",
        help="Request a stream of all entries from a server, even if it supports batch reads and "
        "filtered reads.",
    ),
]
DecodeOption = Annotated[
    Literal["zkevm"] | None, typer.Option(help="Decode entries: add their kind and fields.")
]


def selection_of(types: list[str] | None, prefixes: list[str] | None) -> Selection | None:
    """What --type and --prefix select; None: all entries. Raises `typer.BadParameter`."""
    try:
        return with_prefixes([read_type(each) for each in types or ()], prefixes or ())
    except UsageError as error:
        raise typer.BadParameter(f"--prefix: {error}") from None


def cat(
    source: StreamArgument,
    *,
    start: FromOption = None,
    from_bookmark: FromBookmarkOption = None,
    from_time: FromTimeOption = None,
    last: LastOption = None,
    to: ToOption = None,
    to_bookmark: ToBookmarkOption = None,
    count: CountOption = None,
    types: TypeOption = None,
    prefixes: PrefixOption = None,
    follow: FollowOption = False,
    timeout: TimeoutOption = None,
    decode: DecodeOption = None,
    stream_version: StreamVersionOption = None,
    no_batch_reads: NoBatchReadsOption = False,
    output: EntryOutput,
    options: SourceOptions,
) -> None:
    """Print entries.

    Prints all committed entries or a range; with --follow also later commits. If the server is
    lost, reconnects and continues.

    Examples:
      datastreamer cat stream.bin --last 20 --decode zkevm
      datastreamer cat 127.0.0.1 --from-bookmark block:7 --to-bookmark block:9
    """
    if sum(each is not None for each in (start, from_bookmark, from_time, last)) > 1:
        raise typer.BadParameter(
            "--from, --from-bookmark, --from-time and --last exclude each other"
        )
    if from_time is not None and no_batch_reads:
        raise typer.BadParameter("--from-time and --no-batch-reads exclude each other")
    if to is not None and to_bookmark is not None:
        raise typer.BadParameter("--to and --to-bookmark exclude each other")
    end_key = None if to_bookmark is None else Key(to_bookmark)
    key = None if from_bookmark is None else Key(from_bookmark)
    number = None
    if start not in (None, "latest"):
        number = read_number(start or "", U64_MAX, "--from")
        if to is not None and to < number:
            raise typer.BadParameter(f"--to {to} is less than --from {number}")
    where = selection_of(types, prefixes)
    shape = output.chosen()
    if decode is not None and shape in ("raw", "hex"):
        raise typer.BadParameter(
            f"--format {shape} prints bytes, and --decode needs table or jsonl"
        )
    if stream_version is not None and decode is None:
        raise typer.BadParameter("--stream-version requires --decode")
    if follow and count is None and to is None and to_bookmark is None:
        exit_zero_on_signal()
    with (
        open_source(
            source,
            options,
            follow=follow,
            heartbeat=timeout,
            batch_reads=not no_batch_reads,
        ) as stream,
        named_not_found(source, from_bookmark or ""),
    ):
        if from_time is not None:
            number = stream.entry_at(from_time)
        header = stream.header()
        version = stream_version or header.version
        begin: int | bytes
        if key is not None:
            begin = key.of(version)
        else:
            begin = header.total_entries if start == "latest" else number or 0
            if last is not None:
                begin = max(0, header.total_entries - last)
        header = stream.reach(begin, header, to)
        stop = None if follow else header.total_entries
        if end_key is not None:
            with named_not_found(source, to_bookmark or ""):
                to = stream.bookmark(end_key.of(version))
        if to is not None:
            stop = to + 1 if stop is None else min(to + 1, stop)
        if isinstance(begin, int) and stop is not None:
            if stop <= begin:
                return
            if count is not None and where is None:
                # Ask a server for no more entries than are printed.
                stop = min(stop, begin + max(count, 1))
        if decode is None:
            form = form_of(shape, header, stream.time_marks)
        else:
            form = Decoded(shape, header._replace(version=version), stream.time_marks)
        # Bytes, and JSON without decoding, need no escaping.
        write = write_raw if decode is None and shape != "table" else write_out
        write(form.heading)
        if count == 0:
            return
        if follow:
            exit_when_output_closes()
        at = begin if isinstance(begin, int) else None
        with (
            # On a terminal the entries themselves show the progress.
            ProgressBar(
                f"reading {source}",
                header.total_entries,
                enabled=not follow and not sys.stdout.isatty(),
            ) as progress,
            _history_advice(),
            # Closed here: in a garbage collection a signal would get lost, with a traceback.
            closing(stream.batches(begin, stop, where)) as batches,
        ):
            for batch in batches:
                chosen = batch if count is None else batch[:count]
                if chosen:
                    write(form.render(chosen))
                    if count is not None:
                        count -= len(chosen)
                        if not count:
                            break
                # With filters, batches skip entries.
                progress.advance(batch.next_number - (batch.first_number if at is None else at))
                at = batch.next_number
        form.finish(source)


@contextmanager
def _history_advice() -> Iterator[None]:
    try:
        yield
    except HistoryChanged as error:
        begin = error.first_differing
        if begin is None:
            advice = "all printed entries may belong to the old history; start again with --from 0"
        else:
            advice = (
                f"discard the printed entries from {begin} on, and continue with --from {begin}"
            )
        raise Failure(f"{error}; {advice}") from error
