"""Every message as the bytes that the protocol writes down for it."""

from __future__ import annotations

import pytest

from datastreamer.errors import BadBookmark, UsageError
from datastreamer.protocol import messages
from datastreamer.protocol.commands import (
    BookmarkQuery,
    Command,
    EntryQuery,
    HeaderQuery,
    Start,
    StartBookmark,
    Stop,
    encode_command,
)
from datastreamer.protocol.messages import encode_result

COMMANDS: list[tuple[Command, str, str]] = [
    (Start(8), "0000000000000001 0000000000000001 0000000000000008", "Start from entry 8"),
    (Stop(), "0000000000000002 0000000000000001", "Stop"),
    (HeaderQuery(), "0000000000000003 0000000000000001", "Header"),
    (
        StartBookmark(b"\x01\xff"),
        "0000000000000004 0000000000000001 00000002 01ff",
        "Start from bookmark 0x01ff",
    ),
    (
        EntryQuery(2**64 - 1),
        "0000000000000005 0000000000000001 ffffffffffffffff",
        "Entry 18446744073709551615",
    ),
    (
        BookmarkQuery(b"abcdefghijklmnop"),
        "0000000000000006 0000000000000001 00000010 6162636465666768696a6b6c6d6e6f70",
        "Bookmark 0x6162636465666768696a6b6c6d6e6f70",
    ),
]


@pytest.mark.parametrize("command, encoded, _words", COMMANDS)
def test_a_command_is_number_stream_type_and_parameters(
    command: Command, encoded: str, _words: str
) -> None:
    assert encode_command(command, 1) == bytes.fromhex(encoded)


@pytest.mark.parametrize("command, _encoded, words", COMMANDS)
def test_a_command_names_itself_for_error_messages(
    command: Command, _encoded: str, words: str
) -> None:
    assert str(command) == words


def test_commands_of_the_same_parameters_differ() -> None:
    assert Start(5) != EntryQuery(5)
    assert StartBookmark(b"k") != BookmarkQuery(b"k")


def test_the_stream_type_is_in_every_command() -> None:
    for command, encoded, _ in COMMANDS:
        expected = bytes.fromhex(encoded)
        assert encode_command(command, 7) == expected[:15] + b"\x07" + expected[16:]


@pytest.mark.parametrize("number", [-1, 2**64])
def test_numbers_are_u64(number: int) -> None:
    for command in (Start(number), EntryQuery(number)):
        with pytest.raises(UsageError, match=str(number)):
            encode_command(command, 1)


@pytest.mark.parametrize("size", [0, 17])
def test_keys_are_1_to_16_bytes(size: int) -> None:
    for command in (StartBookmark(bytes(size)), BookmarkQuery(bytes(size))):
        with pytest.raises(BadBookmark, match=f"not {size}"):
            encode_command(command, 1)


@pytest.mark.parametrize(
    "number, encoded",
    [
        (0, "ff 0000000b 00000000 4f4b"),
        (1, "ff 00000018 00000001 416c72656164792073746172746564"),
        (2, "ff 00000018 00000002 416c72656164792073746f70706564"),
        (3, "ff 00000017 00000003 4261642066726f6d20656e747279"),
        (4, "ff 0000001a 00000004 4261642066726f6d20626f6f6b6d61726b"),
        (5, "ff 00000018 00000005 42616420746f20626f6f6b6d61726b"),
        (9, "ff 00000018 00000009 496e76616c696420636f6d6d616e64"),
    ],
)
def test_results_carry_number_and_text(number: int, encoded: str) -> None:
    assert encode_result(number) == bytes.fromhex(encoded)


def test_a_result_of_ones_own_text() -> None:
    assert encode_result(77, "Busy") == bytes.fromhex("ff 0000000d 0000004d 42757379")
    assert encode_result(0) is messages.OK


def test_an_answer_is_the_entry_with_another_packet_type() -> None:
    packed = bytes.fromhex("fe 00000014 00000003 0000000000000007 616263")
    assert messages.encode_answer(7, 3, b"abc") == packed


def test_not_found_is_an_answer_of_type_all_ones() -> None:
    assert bytes.fromhex("fe 00000011 ffffffff 0000000000000000") == messages.NOT_FOUND
