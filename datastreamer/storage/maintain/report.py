"""What a check found out: the problems, what helps against each, and what a repair must know.

Reads no file: `check.py` fills it in, `repair.py` acts on it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any

from datastreamer.format import HEADER_PAGE_SIZE, Header
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Head

# So many problems are told one by one.
_MOST_PROBLEMS = 1000

NO_REPAIR = "none: restore from a copy"
"""What helps where nothing does."""


class Help(Enum):
    """What helps against a problem; how it is said is decided once all is known."""

    CUT = auto()
    TOTALS = auto()
    HEADER = auto()
    RECORDS = auto()
    SIZE = auto()
    UNDO = auto()
    UNPROVEN = auto()
    JOURNAL = auto()
    REINDEX = auto()
    NOTHING = auto()


@dataclass(frozen=True)
class Problem:
    """Something that breaks the format: the place, what was found, and what helps."""

    where: str
    what: str
    repair: str


@dataclass
class Report:
    """What `verify` found out. `notes` are worth knowing and no fault.

    `entries` and `bookmarks` are those that can be read, `pages` those that were.
    """

    ok: bool = True
    entries: int = 0
    bookmarks: int = 0
    pages: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)


@dataclass
class Examination:
    """A report, and what a repair has to know.

    `end` is where the stream ends or should end, `header` what it is; either is None where
    nothing tells. `claimed` is the end that the header names, if that is possible. Whole
    entries, of the stream or not, stand up to `reach`. `unread`: the system refused to read
    on. `goes_back`: the next open for writing goes back to `end` without a repair.
    `half_updated` tells that an update has to be taken back; `unproven` is the entry whose
    update was cut off and cannot be; `bad_journal` tells that the journal of an update is of
    no use, `touch` that the stream file itself is at fault, `reindex` that its index is.
    """

    report: Report
    page: HeaderPage
    size: int
    live: bool
    claimed: Head | None = None
    header: Header | None = None
    end: Head | None = None
    reach: int = HEADER_PAGE_SIZE
    unread: bool = False
    goes_back: bool = False
    half_updated: bool = False
    unproven: int | None = None
    bad_journal: bool = False
    touch: bool = False
    reindex: bool = False
    _found: list[tuple[str, str, Help]] = field(default_factory=list)
    # How many problems are not told one by one.
    left_out: int = 0

    def problem(self, where: int | str, what: str, helps: Help) -> None:
        """Something was found at a byte, or elsewhere; what is said of it waits for `end`."""
        if len(self._found) < _MOST_PROBLEMS:
            self._found.append((f"byte {where}" if isinstance(where, int) else where, what, helps))
        else:
            self.left_out += 1
        self.report.ok = False
        if helps == Help.REINDEX:
            self.reindex = True
        elif helps not in (Help.UNDO, Help.JOURNAL):
            self.touch = True

    @property
    def suspects(self) -> set[tuple[str, object]]:
        """The problems, as another pass over the same file finds them again."""
        return {
            (where, what if helps == Help.REINDEX else helps) for where, what, helps in self._found
        }

    def finish(self) -> None:
        """All is known: have the report tell the problems and what helps."""
        self.report.problems = [
            Problem(where, what, self._advice(helps)) for where, what, helps in self._found
        ]
        if self.left_out:
            self.report.notes.append(f"{self.left_out} more problems are not told one by one")

    def _advice(self, helps: Help) -> str:
        end = self.end
        if helps == Help.REINDEX:
            return "reindex"
        if helps == Help.JOURNAL:
            return "repair, or the next open for writing, keeps the journal under another name"
        if helps == Help.NOTHING or self.unread or end is None or self.header is None:
            return NO_REPAIR
        if helps == Help.CUT and self.claimed is not None and end.entries >= self.claimed.entries:
            helps = Help.TOTALS
        who = "the next open for writing, or repair," if self.goes_back else "repair"
        advice = {
            Help.CUT: f"{who} truncates to {counted(end.entries)}",
            Help.TOTALS: f"repair writes {counted(end.entries)}, {end.length} bytes",
            Help.HEADER: "repair writes the header as it was",
            Help.RECORDS: "repair writes our records anew",
            Help.SIZE: "repair brings the size to the form",
            Help.UNDO: "repair, or the next open for writing, puts the old bytes back",
            Help.UNPROVEN: "put the journal back, or repair keeps the entry as it is",
        }[helps]
        return f"end the writer, then: {advice}" if self.live else advice


def counted(entries: int) -> str:
    """A number of entries in words."""
    return f"{entries} entr{'y' if entries == 1 else 'ies'}"
