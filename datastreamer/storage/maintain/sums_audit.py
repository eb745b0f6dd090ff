"""Compares all pages of a file with their checksums, for `check.py`.

Owns what is a problem and what is a note: only a page whose bytes differ from a proven record is
damaged. Reads records, and gets the pages from the check.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from datastreamer.format import PAGE_SIZE, page_of
from datastreamer.storage.disk.file_ops import Disk, File
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import sums_up_to
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.compare import compare, differs, pages_in_words
from datastreamer.storage.pages.hashes import hash_page, last_page
from datastreamer.storage.pages.proof import ChainWalk, KnownChain, known_chains
from datastreamer.storage.pages.records import SidecarRecords

# An update may be changing the last page: this often it is compared again.
_TRIES = 3
_PAUSE_SECONDS = 0.002
# The maximum number of ranges of pages that a note lists.
_MOST_RANGES = 5


class DamagedRange(NamedTuple):
    """A page that does not match its checksum, and the entries that it held."""

    page: int
    first: int
    end: int
    what: str


class SumsAudit:
    """One pass over the pages of a file."""

    def __init__(
        self,
        disk: Disk,
        path: str,
        file: File,
        page: HeaderPage,
        claimed: Head | None,
        *,
        proven: bool = False,
    ) -> None:
        """`path` is that of the stream, symbolic links resolved; `page` its header page, `claimed`
        the end that this names, if it is possible. `proven`: the stored header is damaged, and the
        one that the commit record was made with is right."""
        self._file = file
        self._page = page
        # The page that an update may have left half changed.
        undo = journal.find(disk, path, file.access())
        self._updating = None if undo is None else page_of(undo.offset)
        # If another program wrote the header, it may have changed pages too.
        self._foreign = page.foreign and not proven
        self._proven = proven
        self._records = SidecarRecords(
            disk,
            path,
            file,
            lambda: HeaderPage.of(file).identity,
            lambda: known_chains(HeaderPage.of(file).known_record),
            most_computed=None,
        )
        record = page.known_record
        # Of the pages' hashes, or of proven ones if pages differ from these.
        self._walk = ChainWalk([] if claimed is None else known_chains(record, claimed))
        self._chain = self._walk.known
        # The pages without a proven record; and those of them that differ from their record.
        self._unknown: list[int] = []
        self._differing: list[int] = []
        self._compared = 0
        self.damaged: list[DamagedRange] = []
        self.notes: list[str] = []
        self.refuted: KnownChain | None = None
        """Set if the pages together do not match the commit record, and their checksums do not show
        why."""

    def inspect(self, page: int, content: bytes) -> None:
        """Compare a page of the file; a page that is not whole is left to `finish`."""
        if len(content) < PAGE_SIZE or page == self._updating:
            return
        self._compared = page + 1
        known, what = compare(self._file, self._records, page, content)
        if known is None:
            found = hash_page(content, page)
            self._walk.add(page, None if found is None else found.digest)
            self._unknown.append(page)
            if self._differs(page, content):
                self._differing.append(page)
            return
        self._walk.add(page, known.digest)
        if what:
            first = self._records.first_number(page)
            self.damaged.append(DamagedRange(page, first, known.next_number, what))

    def _differs(self, page: int, content: bytes) -> bool:
        """Whether a page differs from a record that nothing proves."""
        (loose,) = self._records.unproven(page, page + 1)
        return loose is not None and bool(differs(content, loose))

    def proves(self, page: int) -> bool:
        """Whether a whole page was compared with its checksum and matches it."""
        if self._foreign or page == self._updating or page in self._unknown:
            return False
        return 0 <= page < self._compared and all(each.page != page for each in self.damaged)

    def finish(self, head: Head | None) -> None:
        """All pages up to `head`, the end of the stream, were inspected; None: the end is not
        known."""
        if head is not None:
            if self._walk.fits is False:
                self.refuted = self._chain
            self._check_last_page(head)
            last = last_page(head.length)
            self._note_unknown([page for page in self._unknown if page < last])
        if self._foreign:
            self._differing = sorted({*self._differing, *(each.page for each in self.damaged)})
            self.damaged.clear()
        self._note_differing()
        self._records.close()

    def _note_differing(self) -> None:
        if not self._differing:
            return
        pages = pages_in_words(self._differing)
        if self._foreign:
            note = (
                f"another program wrote the stream last; pages that do not match their checksums "
                f"({pages}) were changed by it or are damaged"
            )
        elif self._walk.fits and self._chain is not None:
            note = (
                "the checksums in FILE.sums are those of another copy or state of the stream; "
                f"the commit record proves {self._chain.described()}; the next writer makes the "
                "checksums again"
            )
        else:
            note = f"{pages} differ from checksums that the commit record does not prove"
        self.notes.append(note)

    def _check_last_page(self, head: Head) -> None:
        page = last_page(head.length)
        for _ in range(_TRIES):
            page_now = HeaderPage.of(self._file)
            record = page_now.known_record if self._proven else page_now.record
            known = None if record is None else record.sum_at(head)
            if page_now.changing or page == self._updating or known is None:
                return  # the record may have the hash from before an update or after it
            if sums_up_to(self._file, head, known) is not None:
                return
            time.sleep(_PAUSE_SECONDS)
        first = self._records.first_number(page)
        what = "the entries do not match their checksum"
        self.damaged = [each for each in self.damaged if each.page != page]
        self.damaged.append(DamagedRange(page, first, head.entries, what))

    def _note_unknown(self, pages: list[int]) -> None:
        if not pages:
            return
        proven = self._walk.fits and self._chain is not None and pages[0] >= self._chain.first
        checked = "the commit record proves them" if proven else "only their form was checked"
        if self.refuted is not None:
            checked = "nothing shows which of them is damaged"
        ranges: list[list[int]] = []
        for page in pages:
            if ranges and page == ranges[-1][1] + 1:
                ranges[-1][1] = page
            else:
                ranges.append([page, page])
        listed = ", ".join(
            str(first) if first == last else f"{first} to {last}"
            for first, last in ranges[:_MOST_RANGES]
        )
        more = "" if len(ranges) <= _MOST_RANGES else ", ..."
        self.notes.append(
            f"{len(pages)} page{'s' if len(pages) > 1 else ''} ({listed}{more}) "
            f"{'have' if len(pages) > 1 else 'has'} no checksum: {checked}; "
            "the writer of the stream, or `datastreamer sums`, makes the checksums"
        )
