"""SOURCE as several servers of one stream."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Invoke
from tests.client.test_resume import Closing
from tests.client.test_resume_every_client import behind
from tests.network.proxy import FaultyServer
from tests.network.stub import Stub, sample
from tests.ports import free_port

HUNDRED = sample(100)


def serving(total: int) -> FaultyServer:
    return behind(*[Stub(HUNDRED[:total]) for _ in range(9)])


def source(*servers: FaultyServer) -> str:
    return ",".join(f"127.0.0.1:{server.port}" for server in servers)


def test_what_one_server_lacks_another_is_asked(invoke: Invoke) -> None:
    for words, expected in (
        (["entry", "50"], [50]),
        (["bookmark", "0x00000032"], [51]),
        (["cat", "--from", "50", "--to", "55"], list(range(50, 56))),
        (["cat", "--from", "25", "--to", "40"], list(range(25, 41))),
        (["cat", "--from", "90", "--to", "200"], list(range(90, 100))),
        (["cat", "--from-bookmark", "0x0000003c", "--count", "2"], [60, 61]),
    ):
        with serving(30) as short, serving(100) as long:
            name, *rest = words
            done = invoke(name, source(short, long), *rest)
            assert (done.code, done.err) == (0, "")
            assert [each["number"] for each in done.objects] == expected


def test_a_server_that_is_lost_during_the_read(invoke: Invoke) -> None:
    lost = behind(Closing(HUNDRED[:40], header_total=100), ends=True)
    with lost, serving(100) as other:
        cat = invoke("cat", source(lost, other), "--no-batch-reads")
    assert cat.code == 0
    assert [each["number"] for each in cat.objects] == list(range(100))


def test_the_error_names_all_servers(invoke: Invoke) -> None:
    with serving(30) as short, serving(60) as longer:
        servers = source(short, longer)
        one, other = servers.split(",")
        assert invoke("entry", servers, "70").failed() == (
            f"{servers}: asked 2 servers: {one}: no entry 70: the stream holds 0 to 29; "
            f"{other}: no entry 70: the stream holds 0 to 59"
        )
    ports = free_port(), free_port()
    failed = invoke("cat", ",".join(f"127.0.0.1:{port}" for port in ports)).failed()
    assert failed == "asked 2 servers: " + "; ".join(
        f"cannot connect to 127.0.0.1:{port}: Connection refused" for port in ports
    )


def test_a_file_is_no_server_of_several(invoke: Invoke, made: Path) -> None:
    failed = invoke("cat", f"127.0.0.1:6900,{made}").failed(2)
    assert failed.startswith(f"Invalid value: 127.0.0.1:6900,{made}: name one file, or")


def test_a_command_that_reads_a_single_server(invoke: Invoke) -> None:
    with serving(30) as one, serving(30) as other:
        several = source(one, other)
        failed = invoke("verify", several).failed()
        assert failed == f"{several}: no such file, and this reads a single server"
        done = invoke("entry", several.replace(",", ", "), "7")
        assert [each["number"] for each in done.objects] == [7]
