"""The result of a check: the problems, what helps against each, and what a repair must know.

Reads no file: `check.py` fills it in, `repair.py` acts on it.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any

from datastreamer.format import HEADER_PAGE_SIZE, Header
from datastreamer.printable import counted
from datastreamer.storage.header import records
from datastreamer.storage.header.inspect import is_running
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Head

# The maximum number of problems that are listed.
_MOST_PROBLEMS = 1000

NO_REPAIR = (
    "none: restore from a copy, or copy the stream from a server: `datastreamer relay --server "
    "HOST:PORT --file NEW`"
)
"""The advice for a problem that no repair solves."""


class Help(Enum):
    """What helps against a problem; the words are chosen once everything is known."""

    CUT = auto()
    DAMAGE = auto()
    TOTALS = auto()
    HEADER = auto()
    RECORDS = auto()
    SIZE = auto()
    UNDO = auto()
    UNPROVEN = auto()
    JOURNAL = auto()
    REINDEX = auto()
    PAGE = auto()
    CHAIN = auto()
    NOTHING = auto()


@dataclass(frozen=True)
class Problem:
    """Something that breaks the format: the place, what was found, and what helps."""

    where: str
    what: str
    repair: str


@dataclass
class Report:
    """The result of `verify`. `notes` are worth knowing and no fault.

    `entries` and `bookmarks` count those that can be read, `pages` those that were.
    """

    ok: bool = True
    entries: int = 0
    bookmarks: int = 0
    pages: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass
class Examination:
    """A report, and what a repair has to know.

    `end` is where the stream ends or should end before any damage, `header` its header; None if
    unknown. `claimed` is the end that the header names, if that is possible. `kept_end` is where
    the stream ends if the entries after damaged pages remain; `heal_end` where it ends if all its
    pages are restored. Whole entries, of the stream or not,
    reach `reach`. `unread`: the system refused to read on. `truncated_by_open`: the next open for
    writing truncates to `end` without a repair. `half_updated`: an update has to be undone;
    `damaged` says that entries cannot be read, `first_damaged` is the first page that is missing,
    breaks the format or does not match its checksum, None if there is none; `proven_before`: the
    page before it matches its checksum. `unproven` is an entry whose update cannot be undone.
    `refuted`: the pages together do not match the commit record, and nothing shows which differ.
    `bad_journal`: an update's journal is unusable; `touch`: the stream file itself has a problem,
    apart from damaged pages; `reindex`: its index has one.
    """

    report: Report
    path: str
    page: HeaderPage
    size: int
    live: bool
    claimed: Head | None = None
    header: Header | None = None
    end: Head | None = None
    kept_end: Head | None = None
    heal_end: Head | None = None
    reach: int = HEADER_PAGE_SIZE
    unread: bool = False
    truncated_by_open: bool = False
    half_updated: bool = False
    unproven: int | None = None
    bad_journal: bool = False
    touch: bool = False
    reindex: bool = False
    damaged: bool = False
    refuted: bool = False
    first_damaged: int | None = None
    proven_before: bool = False
    _found: list[tuple[str, str, Help]] = field(default_factory=list)
    # The number of problems that are not listed.
    left_out: int = 0

    def problem(self, where: int | str, what: str, helps: Help) -> None:
        """Record what was found at a byte, or elsewhere; `finish` reports it."""
        if len(self._found) < _MOST_PROBLEMS:
            self._found.append((f"byte {where}" if isinstance(where, int) else where, what, helps))
        else:
            self.left_out += 1
        self.report.ok = False
        if helps == Help.REINDEX:
            self.reindex = True
        elif helps in (Help.DAMAGE, Help.PAGE):
            self.damaged = True
        elif helps == Help.CHAIN:
            self.refuted = True
        elif helps not in (Help.UNDO, Help.JOURNAL):
            self.touch = True

    @property
    def suspects(self) -> set[tuple[str, object]]:
        """The problems, in a form that is equal in another pass over the same file."""
        return {
            (where, what if helps == Help.REINDEX else helps) for where, what, helps in self._found
        }

    def finish(self) -> None:
        """Everything is known: put the problems and what helps into the report."""
        self.report.problems = [
            Problem(where, what, self._advice(where, helps)) for where, what, helps in self._found
        ]
        if self.left_out:
            self.report.notes.append(f"{self.left_out} more problems are not listed")

    def _advice(self, where: str, helps: Help) -> str:
        end = self.kept_end
        if helps == Help.REINDEX:
            return f"run `datastreamer reindex {shlex.quote(self.path)}`"
        if helps == Help.JOURNAL:
            return "repair, or the next open for writing, keeps the journal under another name"
        if helps == Help.NOTHING or self.unread or end is None or self.header is None:
            return NO_REPAIR
        if helps == Help.DAMAGE:
            helps = Help.PAGE if int(where.removeprefix("byte ")) < end.length else Help.CUT
        if helps == Help.CUT and self.claimed is not None and end.entries >= self.claimed.entries:
            helps = Help.TOTALS
        run = alone = f"run `datastreamer repair {shlex.quote(self.path)}"
        missing = self.heal_end is not None and self.heal_end.length > self.size
        if missing or self.page.lost_record:
            # Without a server it truncates the stream, or takes the last page as it is.
            alone += " --from HOST:PORT"
        by = "the next open for writing, or repair," if self.truncated_by_open else "repair"
        cut = f"{by} truncates to {counted(end.entries)}"
        if self.heal_end is not None and self.heal_end > end and not self.truncated_by_open:
            cut = (
                f"{run} --from HOST:PORT`: it restores what is missing from a server of the same "
                f"stream; without one, {cut}"
            )
        advice = {
            Help.CUT: cut,
            Help.TOTALS: f"{alone}`: it writes {counted(end.entries)}, {end.length} bytes",
            Help.HEADER: f"{alone}`: it writes the previous header; entries stay as they are",
            Help.RECORDS: f"{alone}`: it writes the records again; entries stay as they are",
            Help.SIZE: f"{alone}`: it corrects the size",
            Help.UNDO: "repair, or the next open for writing, restores the old bytes",
            Help.UNPROVEN: "restore the journal, or repair keeps the entry as it is",
            Help.PAGE: f"{run} --from HOST:PORT`: it restores the page from a server of the same "
            "stream",
            Help.CHAIN: f"{run} --from HOST:PORT`: it finds and restores the page with a server of "
            "the same stream; if none has it, `datastreamer sums --accept` takes the damage for "
            "right",
        }[helps]
        return f"{self._end_writer(helps)}, then: {advice}" if self.live else advice

    def _end_writer(self, helps: Help) -> str:
        writer = records.get_writer(self.page)
        who = f"process {writer.pid}" if writer and is_running(writer) else "the process"
        end = f"stop {who}, the relay, server or other program that writes this file"
        if helps != Help.PAGE:
            return end
        return f"a relay and `serve --heal` restore the page once it is read; if not, {end}"
