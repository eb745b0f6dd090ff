"""Where a server listens: several addresses, both families, interfaces, Unix sockets."""

from __future__ import annotations

import contextlib
import errno
import functools
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.errors import ConnectFailed, ListenFailed, UnknownEntry
from datastreamer.service.embedded import StreamServer
from datastreamer.service.serve import serve
from datastreamer.storage.stream import DataStream
from datastreamer.transport import listeners as listen
from datastreamer.transport.listeners import (
    UnixListener,
    address_of,
    host_of,
    leads_to,
    name_of,
    open_listeners,
)
from datastreamer.transport.server_stream import SocketTransport
from tests.network import model as wire
from tests.network.fixtures import append, over_unix
from tests.network.model import OK, Model

MIB = 1 << 20
BOTH = [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def link_local() -> str | None:
    """An address of this machine that says nothing without its interface."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        digits, _, _, scope, _, interface = line.split()
        if scope == "20":
            packed = bytes.fromhex(digits)
            return f"{socket.inet_ntop(socket.AF_INET6, packed)}%{interface}"
    return None


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


# Several addresses.


@needs_ipv6
async def test_several_addresses_have_one_port(stream: DataStream) -> None:
    append(stream, (1, b"here"))
    async with trio.open_nursery() as nursery:
        hosts = ["127.0.0.1", "::1", "localhost", "127.0.0.1"]
        addresses = await nursery.start(functools.partial(serve, stream, host=hosts, port=0))
        assert {host for host, _ in addresses} == {"127.0.0.1", "::1"}
        assert len(addresses) == 2
        assert len({port for _, port in addresses}) == 1
        for host, port in addresses:
            async with connect(host, port) as client:
                assert (await client.entry(0)).data == b"here"

            def ask(host: str = host, port: int = port) -> bytes:
                with BlockingClient(host, port) as client:
                    return client.entry(0).data

            assert await trio.to_thread.run_sync(ask) == b"here"
        nursery.cancel_scope.cancel()


def test_one_address_that_cannot_be_had(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use; stop the"
        with pytest.raises(ListenFailed, match=message):
            open_listeners(["127.0.0.2", "127.0.0.1"], port, tmp_path / "socket")
        # Nothing is left.
        socket.create_server(("127.0.0.2", port)).close()
        assert not (tmp_path / "socket").exists()
    with pytest.raises(
        ListenFailed, match=r"192\.0\.2\.77:0: .*this machine does not have that address"
    ):
        open_listeners(["127.0.0.1", "192.0.2.77"], 0)


def test_a_free_port_that_is_taken_on_the_next_address(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = listen._listen, []

    def once(family: int, address: tuple[object, ...]) -> object:
        if address[0] == "127.0.0.2" and not refused:
            refused.append(address)
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return real(family, address)

    monkeypatch.setattr(listen, "_listen", once)
    listeners = open_listeners(["127.0.0.1", "127.0.0.2"], 0)
    assert len(refused) == 1
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        listener.close()


def test_nothing_to_listen_on() -> None:
    with pytest.raises(ListenFailed, match="nothing to listen on: give a port, or a path"):
        open_listeners(None, None)
    with pytest.raises(
        ListenFailed, match="cannot listen on port 0: the list of addresses is empty"
    ):
        open_listeners([], 0)


@pytest.mark.skipif(link_local() is None, reason="no link-local address on this machine")
async def test_a_link_local_address_names_its_interface(stream: DataStream) -> None:
    host = link_local()
    assert host is not None
    async with trio.open_nursery() as nursery:
        [(name, port)] = await nursery.start(functools.partial(serve, stream, host=host, port=0))
        assert name == host
        async with connect(host, port) as client:
            assert client.peer == f"[{host}]:{port}"
            assert (await client.header()).total_entries == 0
        nursery.cancel_scope.cancel()
    with pytest.raises(ListenFailed, match="a link-local address needs its interface, as in"):
        open_listeners(host.partition("%")[0], 0)


def test_the_names_of_addresses_with_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_indextoname", {3: "eth3"}.__getitem__)
    assert address_of(("fe80::1", 7, 0, 3)) == "[fe80::1%eth3]:7"
    assert address_of(("fe80::1%eth3", 7, 0, 3)) == "[fe80::1%eth3]:7"
    assert address_of(("unix:/run/socket", 0)) == "unix:/run/socket"


# Unix sockets.


@pytest.mark.parametrize(
    ("address", "host"),
    [
        (("127.0.0.1", 5), "127.0.0.1"),
        (("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:3::9", 5, 0, 0), "2001:db8:1:3::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::1%eth0"),
        (("fe80::2%eth0", 5, 0, 2), "fe80::2%eth0"),
        ("", "local"),
    ],
)
def test_whose_connection_it_is(address: object, host: str) -> None:
    """An IPv6 host has as many addresses as it likes within its network."""
    assert host_of(address) == host


async def test_beside_tcp_and_alone(stream: DataStream, tmp_path: Path) -> None:
    append(stream, (1, b"here"))
    path = tmp_path / "socket"
    for port in (0, None):
        async with trio.open_nursery() as nursery:
            call = functools.partial(serve, stream, host="127.0.0.1", port=port, unix=path)
            addresses = await nursery.start(call)
            assert addresses[0] == (f"unix:{path}", 0)
            assert len(addresses) == (1 if port is None else 2)
            async with connect(f"unix:{path}") as client:
                assert client.peer == f"unix:{path}"
                assert (await client.entry(0)).data == b"here"
                with pytest.raises(UnknownEntry):
                    await client.entry(1)
            if port is not None:
                async with connect(*addresses[1]) as client:
                    assert (await client.entry(0)).data == b"here"
            nursery.cancel_scope.cancel()
        assert not path.exists()
        with pytest.raises(ConnectFailed, match=rf"cannot connect to unix:{path}: No such file"):
            BlockingClient(f"unix:{path}")


@pytest.mark.parametrize("in_process", [False, True], ids=["child", "thread"])
def test_an_embedded_server(path: Path, tmp_path: Path, in_process: bool) -> None:
    place = tmp_path / "socket"
    with StreamServer(path, port=None, unix=place, sync="os", in_process=in_process) as server:
        assert server.addresses == [(f"unix:{place}", 0)]
        assert server.port == 0
        with (
            BlockingClient(f"unix:{place}") as client,
            client.entries(from_entry=0) as entries,
        ):
            with server.stream.atomic_op() as op:
                op.add_entries(1, [bytes(20_000)] * 500)
            assert [next(entries).number for _ in range(500)] == list(range(500))
            with server.stream.atomic_op() as op:
                op.add_entry(2, b"live")
            assert next(entries).data == b"live"
        assert place.exists()
    assert not place.exists()


def test_a_forked_process_leaves_it(path: Path, tmp_path: Path) -> None:
    code = """
import os, sys
from datastreamer import StreamServer
with StreamServer(sys.argv[1], port=None, unix=sys.argv[2], sync="os") as server:
    child = os.fork()
    if not child:
        server.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.exists(sys.argv[2])
assert not os.path.exists(sys.argv[2])
"""
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "socket"], check=True)


def test_what_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.is_socket()
    [listener] = open_listeners(None, None, path)
    with pytest.raises(
        ListenFailed, match=rf"cannot listen on unix:{path}: another server listens there; stop"
    ):
        open_listeners(None, None, path)
    assert name_of(listener) == (f"unix:{path}", 0)
    assert path.exists()
    listener.close()
    listener.close()
    assert not path.exists()


def test_a_live_server_with_a_full_queue_is_alive(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        waiting = []
        try:
            while True:
                made = socket.socket(socket.AF_UNIX)
                waiting.append(made)
                made.setblocking(False)
                made.connect(str(path))
        except BlockingIOError:
            pass
        with pytest.raises(ListenFailed, match="another server listens there"):
            open_listeners(None, None, path)
        for made in waiting:
            made.close()


def test_something_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ListenFailed, match="the path exists and is not a socket; move it away"):
        open_listeners(None, None, path)
    assert path.read_text() == "precious"
    # Nor what came into its place since.
    listener = UnixListener.at(tmp_path / "socket")
    (tmp_path / "socket").unlink()
    (tmp_path / "socket").write_text("another's")
    listener.close()
    assert (tmp_path / "socket").read_text() == "another's"


@pytest.mark.parametrize(
    "name, message",
    [
        ("no/such/folder", "No such file or directory; create the folder first"),
        ("x" * 200, "AF_UNIX path too long; choose a shorter one"),
    ],
)
def test_places_that_cannot_be_had(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ListenFailed, match=f"cannot listen on unix:{tmp_path}/{name}: {message}"):
        open_listeners(None, None, tmp_path / name)


def test_servers_that_begin_at_once_are_one(tmp_path: Path) -> None:
    """Over what a dead one left: each takes it for stale, and one of them gets the place."""
    path = tmp_path / "socket"
    for _ in range(10):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        together = threading.Barrier(8)
        made: list[socket.socket] = []

        def begin(together: threading.Barrier, made: list[socket.socket]) -> None:
            together.wait()
            with contextlib.suppress(ListenFailed):
                made.extend(open_listeners(None, None, path))

        threads = [threading.Thread(target=begin, args=(together, made)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [listener] = made
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        listener.close()
        assert not path.exists()


async def test_a_file_goes_by_copies(stream: DataStream) -> None:
    """What a peer's queue holds stays as it was sent, whatever is written in its place."""
    append(stream, *[(1, bytes([n % 251]) * 20_000) for n in range(520)])
    old = modelled(stream)
    async with over_unix(stream) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        await wait_all_tasks_blocked(0.002)
        [session] = rig.server.sessions
        assert session.transport.socket_fd is not None
        assert not session.transport.by_reference
        assert session.sender.owes(300)
        stream.truncate(1)
        append(stream, *[(2, b"\xaa" * 20_000)] * 519)
        got = await peer.rest()
        assert len(got) > 50_000
        assert got == old.packed()[: len(got)]


async def test_an_update_ends_no_connection(stream: DataStream) -> None:
    append(stream, *[(1, bytes([n % 251]) * 20_000) for n in range(520)])
    old = modelled(stream)
    async with over_unix(stream) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        await wait_all_tasks_blocked(0.002)
        stream.update_entry(0, 1, b"\xaa" * 20_000)
        stream.update_entry(519, 1, b"\xbb" * 20_000)
        await peer.expect(old.packed(0, 519) + modelled(stream).packed(519))
        await peer.nothing_more()


async def test_bytes_into_the_kernel_and_out(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4096)
    transport = SocketTransport(ours)
    with theirs, (tmp_path / "file").open("rb") as file:
        sent = transport.send_file(file.fileno(), 5, MIB)
        assert 0 < sent < MIB
        (tmp_path / "file").write_bytes(bytes(MIB))
        got = b""
        while len(got) < sent:
            got += theirs.recv(MIB)
        assert got == (bytes(range(256)) * 4096)[5 : 5 + sent]
        with pytest.raises(EOFError):
            transport.send_file(file.fileno(), MIB, 10)
        await transport.close()


@pytest.mark.parametrize(
    ("host", "dialled", "own"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        (None, "127.0.0.1", True),
        (None, "::1", True),
        ("127.0.0.1", "another", False),
    ],
)
def test_where_a_connection_leads(host: str | None, dialled: str, own: bool) -> None:
    if dialled == "::1" and not has_ipv6():
        pytest.skip("there is no IPv6 here")
    with contextlib.ExitStack() as stack:
        listeners = open_listeners(host, 0)
        port = listeners[0].getsockname()[1]
        for listener in listeners:
            stack.enter_context(listener)
        if not own:
            [another] = open_listeners("127.0.0.1", 0)
            stack.enter_context(another)
            dialled, port = another.getsockname()
        connection = stack.enter_context(socket.create_connection((dialled, port), 20))
        assert leads_to(connection, listeners) is own
        assert not leads_to(connection, [])
    assert not leads_to(connection, listeners)  # closed: nowhere


def test_where_a_connection_to_a_listener_of_both_families_leads() -> None:
    if not has_ipv6():
        pytest.skip("there is no IPv6 here")
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as both,
        socket.create_connection(("127.0.0.1", both.getsockname()[1]), 20) as connection,
    ):
        assert leads_to(connection, [both])


@needs_ipv6
def test_an_address_in_brackets_is_that_address(path: Path) -> None:
    with StreamServer(path, host="[::1]", port=0) as server:
        assert server.addresses[0][0] == "::1"
        with BlockingClient("[::1]", server.addresses[0][1]) as client:
            assert client.header().total_entries == 0
