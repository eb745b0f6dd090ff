"""The options' texts."""

from __future__ import annotations

import pytest

from datastreamer.errors import UsageError
from datastreamer.selection.clauses import Where
from datastreamer.spark.options import TLS, Options, read_options
from datastreamer.transport.address import Address
from datastreamer.zkevm.bookmark_keys import BookmarkName


def test_what_is_not_said_has_a_default() -> None:
    assert read_options({"path": "a.bin"}) == Options(paths=("a.bin",))
    assert read_options({"server": "a:1"}) == Options(servers=(Address("a", 1),))


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"PATH": " a.bin "}, Options(("a.bin",))),
        ({"file": "a.bin"}, Options(("a.bin",))),
        ({"paths": '["a", "b"]'}, Options(("a", "b"))),
        ({"path": "a", "table": "Blocks"}, Options(("a",), table="blocks")),
        ({"path": "a", "mode": "permissive"}, Options(("a",), mode="PERMISSIVE")),
        ({"path": "a", "partitionBytes": "64m"}, Options(("a",), partition_bytes=64 << 20)),
        ({"path": "a", "partitionbytes": "1 GB"}, Options(("a",), partition_bytes=1 << 30)),
        ({"path": "a", "startingOffset": "earliest"}, Options(("a",))),
        ({"path": "a", "endingOffset": "latest"}, Options(("a",))),
        (
            {"path": "a", "startingOffset": "7", "endingOffset": "block:9"},
            Options(("a",), start=7, stop=BookmarkName("block", 9)),
        ),
        ({"path": "a", "systemId": "true"}, Options(("a",), system_id=True)),
        ({"path": "a", "streamVersion": "3"}, Options(("a",), version=3)),
        ({"path": "a", "types": "16"}, Options(("a",), where=(16,))),
        ({"path": "a", "Types": " 16 , 2,16"}, Options(("a",), where=(2, 16))),
        (
            {"path": "a", "types": "16,2", "prefixes": "2:0x00, 0xFf01,2:0x0001"},
            Options(
                ("a",),
                where=tuple(
                    Where(kind, *prefix)
                    for kind in (2, 16)
                    for prefix in ((0, b"\xff\x01"), (2, b"\0"))
                ),
            ),
        ),
        (
            {"server": "a:1", "batchReads": "FALSE"},
            Options((), (Address("a", 1),), batch_reads=False),
        ),
        ({"path": "a", "spark.anything": "x"}, Options(("a",))),
        (
            {"server": "a:1, [::1]:6900,unix:/run/s,b,tcps://c:7"},
            Options(
                servers=(
                    Address("a", 1),
                    Address("::1", 6900),
                    Address("unix:/run/s", 0),
                    Address("b", 6900),
                    Address("c", 7, tls=True),
                )
            ),
        ),
        ({"server": "a:1", "tls": "true"}, Options(servers=(Address("a", 1),), tls=TLS())),
        (
            {"server": "a:1", "tlsCa": "ca.pem", "retryFor": "0.5"},
            Options(servers=(Address("a", 1),), tls=TLS("ca.pem"), retry_for=0.5),
        ),
    ],
)
def test_what_is_said(given: dict[str, str], expected: Options) -> None:
    assert read_options(given) == expected


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "say where the stream is"),
        ({"table": "blocks"}, "say where the stream is"),
        ({"path": "a", "server": "b:1"}, "not both"),
        ({"option.file": "a", "file": "a", "owner": "me"}, "CREATE TEMPORARY VIEW name USING"),
        ({"file": "a", "owner": "me", "provider": "datastream"}, "instead of CREATE TABLE"),
        ({"path": "a", "startingOffset": "9" * 5000}, "is not earliest, an entry number"),
        ({"path": "a", "endingOffset": f"block:{1 << 64}"}, "is not latest, an entry number"),
        ({"path": "a", "partitionBytes": "9" * 5000}, "is not a number of bytes"),
        ({"path": "a", "streamType": str(1 << 64)}, "is not a number from 0 to 184467440737095"),
        ({"server": "a:1", "timeout": "0"}, "'0' is not a number of seconds, 0.001 or more"),
        (
            {"server": "a:1", "timeout": "1e12"},
            "'1e12' is not a number of seconds, 0.001 or more an",
        ),
        ({"server": "a:1", "retryFor": "1e12"}, "or forever, 0 or more and at most 1e+09"),
        ({"path": "a", "file": "b"}, "the options path and file are the same: give only one"),
        ({"server": "", "path": " "}, "say where the stream is"),
        ({"path": "a", "table": ""}, "option table is empty"),
        ({"path": "a", "mode": " "}, "option mode is empty"),
        ({"path": "a", "partitionbytes": ""}, "option partitionBytes is empty"),
        ({"path": "a", "streamVersion": ""}, "option streamVersion is empty"),
        ({"path": "a", "endingOffset": ""}, "option endingOffset is empty"),
        ({"path": "a", "streamVersion": "0"}, "'0' is not a number from 1 to 255"),
        ({"server": "a:1", "timeout": "nan"}, "'nan' is not a number of seconds"),
        ({"path": "a", "tabel": "blocks"}, "no option 'tabel': the options are path, "),
        ({"path": "a", "types": "16,"}, "option types: '16,' is not numbers from 0 to 4294967295"),
        ({"path": "a", "types": "0x10"}, "option types: '0x10' is not numbers from 0 to 4294"),
        ({"path": "a", "types": str(1 << 32)}, "separated by commas"),
        ({"path": "a", "types": ""}, "option types is empty"),
        ({"path": "a", "prefixes": "0x01"}, "option prefixes: a prefix is compared in entries of"),
        (
            {"path": "a", "types": "1", "prefixes": "0x01,"},
            "option prefixes: a prefix is [OFFSET:]0xHEX, with 1 to 255 bytes and an offset",
        ),
        ({"path": "a", "types": "1", "prefixes": "65536:0x01"}, "an offset up to 65,535"),
        (
            {"path": "a", "table": "blocks", "types": "2"},
            "the options types and prefixes are for the table entries: leave them out for the tab",
        ),
        ({"server": "a", "table": "bookmarks", "prefixes": "0x01"}, "leave them out for the tabl"),
        ({"server": "a:1", "batchReads": "no"}, "option batchReads: 'no' is not true or false"),
        ({"path": "a", "table": "logs"}, "option table: 'logs' is not one of entries, blocks"),
        ({"path": "a", "mode": "RELAXED"}, "option mode: 'RELAXED' is not one of FAILFAST"),
        ({"path": "a", "partitionBytes": "0"}, "option partitionBytes: '0' is not a number"),
        ({"path": "a", "partitionBytes": "12x"}, "'12x' is not a number of bytes"),
        ({"path": "a", "startingOffset": "later"}, "option startingOffset: 'later' is not e"),
        ({"path": "a", "startingOffset": "-1"}, "'-1' is not earliest, an entry number"),
        ({"path": "a", "endingOffset": "block:x"}, "'block:x' is not latest"),
        ({"path": "a", "systemId": "yes"}, "option systemId: 'yes' is not true or false"),
        ({"path": "a", "streamVersion": "256"}, "'256' is not a number from 1 to 255"),
        ({"path": "a", "paths": "b.bin"}, "'b.bin' is not a list of paths in JSON"),
        ({"path": "a", "paths": '["b", " "]'}, "is not a list of paths in JSON"),
        ({"server": "http://a:1"}, "option server: 'http://a:1': write the server as tcp://HOST"),
        ({"server": "a:70000"}, "option server: 'a:70000': a port is a number from 1 to 65535"),
        ({"server": "a:1", "timeout": "soon"}, "'soon' is not a number of seconds"),
        ({"path": "a", "maxEntriesPerTrigger": "0"}, "'0' is not a number from 1 to"),
        ({"path": "a", "maxBytesPerTrigger": "much"}, "'much' is not a number of bytes"),
        ({"path": "a", "retryFor": "never"}, "'never' is not a number of seconds or forever"),
    ],
)
def test_an_invalid_option_is_an_error_of_one_line(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_options(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
