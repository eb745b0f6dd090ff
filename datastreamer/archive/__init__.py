"""A stream in object storage: compressed immutable objects that prove themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datastreamer.storage.pages.page_states import Verify
    from datastreamer.storage.stream import DataStream

PREFIX: Final = "archive:"
"""Before the URL of an archive, where a stream file or a server may be named too."""


def is_archive(source: str) -> bool:
    """Whether this names an archive: `PREFIX` and a URL."""
    return source.startswith(PREFIX)


def open_to_read(
    source: str, *, stream_type: int | None = None, follow: bool = False, verify: Verify = "cold"
) -> DataStream:
    """Open a stream file, or the stream of an archive, which writes nothing.

    Raises what `DataStream.open` raises, and what is below `ArchiveError`.
    """
    if is_archive(source):
        from datastreamer.archive.reading import Archive

        url = source.removeprefix(PREFIX)
        return Archive.open(url, stream_type=stream_type).stream(follow=follow, last=True)
    from datastreamer.storage.stream import DataStream

    return DataStream.open(
        source, stream_type=stream_type, read_only=True, follow=follow, verify=verify
    )
