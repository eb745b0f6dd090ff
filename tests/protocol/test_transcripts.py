"""What the reference and its relatives said, byte for byte, against both of our sides.

Server: the model session of `transcripts` answers every conversation. Class contract is
reproduced; for a quirk, our choice is asserted; for a defect, what would be right.
Client: `ClientConnection` reads everything that any of them sent, defects too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cache

import pytest

from datastreamer.errors import ProtocolViolation
from datastreamer.format import ENTRY_HEAD_STRUCT, Header
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import (
    BookmarkQuery,
    Command,
    EntryQuery,
    HeaderQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
)
from datastreamer.protocol.events import (
    EntriesReceived,
    EntryReceived,
    RangeReceived,
    ResultReceived,
)
from datastreamer.protocol.messages import NOT_FOUND, OK, encode_result
from datastreamer.protocol.server import Drop, Refuse
from tests.conftest import Golden
from tests.protocol.transcripts import (
    Cut,
    Model,
    Session,
    Step,
    bytewise,
    is_about_ranges,
    packets,
    read_as_length_0,
    whole,
)

CLOSING = (encode_result(1), encode_result(2))


def recorded(step: Step, said: bytes) -> bytes:
    """The bytes of a step; of a long one the sum is recorded, and `said` if it is the same."""
    if "recv_hex" in step:
        return bytes.fromhex(step["recv_hex"])
    same = (len(said), hashlib.sha256(said).hexdigest()) == (step["recv_len"], step["recv_sha256"])
    return said if same else b""


class Played:
    """One conversation with the model session, step by step."""

    def __init__(self, golden: Golden, conversation: list[Step], cut: Cut) -> None:
        self.model = Model(golden, conversation[0]["file"])
        self.session = Session(self.model)
        self.cut = cut

    def step(self, step: Step) -> bytes:
        before = len(self.model.entries)
        self.streamed = self.session.cursor is not None
        for operation in step.get("server_operations", []):
            self.model.play(operation)
        self.committed = self.model.packed_from(before)
        if step["send_hex"]:
            for piece in self.cut(bytes.fromhex(step["send_hex"])):
                self.session.receive(piece)
        if step.get("client_ends_sending"):
            self.session.receive(b"")
        return self.session.take_sent()

    def truncated(self, step: Step) -> bool:
        """Whether entries were cut off under the client that streams."""
        operations = step.get("server_operations", [])
        return self.streamed and any(op["op"] == "truncate" for op in operations)

    def usual(self, step: Step) -> bytes:
        """What a connection receives that has no past but its streaming, if it streams."""
        sent = bytes.fromhex(step["send_hex"])
        if not sent:
            return self.committed if self.streamed else b""
        if self.streamed:
            return OK if sent[7] == 2 else encode_result(1)
        session = Session(self.model)
        session.receive(sent)
        return session.take_sent()


def right(played: Played, step: Step, said: bytes) -> bytes:
    """What a step of class quirk or defect must say instead of, or like, what was recorded."""
    was, why = recorded(step, said), step["why"]
    sent = bytes.fromhex(step["send_hex"])
    if sent[7:8] == b"\7":
        return played.usual(step)
    if why.startswith(("no event follows", "answers an entry that is not")):
        return OK + NOT_FOUND
    if why.startswith(("an earlier refused command", "follows from")):
        return played.usual(step)
    if why.startswith("a bookmark length of 0"):
        assert isinstance(played.session.last, Drop)
        return b""
    if why.startswith("uncommitted entries count"):
        return encode_result(3)
    if why.startswith("the client is not told of the truncation"):
        assert played.session.closed
        return b""
    if why.startswith("sends an entry that is not committed") and sent[7] == 1:
        # Equal but for the stale entry at the end.
        number = int.from_bytes(sent[16:], "big")
        return b"".join(packets(was)[:-1]) if was else OK + played.model.packed_from(number)
    if why.startswith(("live entries below", "one committed operation")):
        return played.usual(step)
    if why.startswith(("the bookmark index was not", "sends an entry that is not committed")):
        return by_scan(played, sent)
    if why.startswith("a Start during an open operation"):
        return unserved_start(played, step)
    if why.startswith("reading at the end of the file"):
        return played.usual(step)
    if why.startswith("this version ends the connection"):
        if was.startswith(encode_result(4)):
            return by_scan(played, sent)
        # Whether it then closes is ours to say, and what was asked behind is answered.
        return was + said[len(was) :] if was else played.usual(step)
    assert why.startswith(("the parameters of the refused command", "depends on an option")), why
    return was


def by_scan(played: Played, sent: bytes) -> bytes:
    """The answer to a StartBookmark or Bookmark where the entries alone name the bookmarks."""
    number = played.model.bookmark(sent[20:])
    if sent[7] == 4:
        return encode_result(4) if number is None else OK + played.model.packed_from(number)
    answer = played.session.first_event(number)
    if answer is None:
        return OK + NOT_FOUND
    return OK + b"\xfe" + played.model.entries[answer][1][1:]


def unserved_start(played: Played, step: Step) -> bytes:
    """A Start at the committed total waits and is served; behind it, it is refused."""
    if step["what"] == "Start 16":
        return OK
    if step["what"] == "Start 17":
        return encode_result(3)
    if step["what"].startswith("StartBookmark"):
        return encode_result(4)
    return played.usual(step)


@pytest.fixture
def cached(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> Golden:
    """The golden files, unpacked once a test."""
    monkeypatch.setattr(golden, "content", cache(golden.content))
    return golden


@pytest.mark.parametrize("cut", [whole, bytewise])
@pytest.mark.parametrize(
    "server, compared",
    [
        ("reference", {"contract": 357, "quirk": 31, "defect": 66, "diverged": 45}),
        ("older", {"contract": 33, "quirk": 56, "defect": 26, "diverged": 28}),
        ("fork", {"contract": 67, "quirk": 13, "defect": 10, "diverged": 11}),
    ],
)
def test_the_server_says_what_it_should(
    cached: Golden, server: str, compared: dict[str, int], cut: Cut
) -> None:
    count: Counter[str] = Counter()
    for name, conversation in cached.transcript(server).items():
        if server != "fork" and is_about_ranges(conversation):
            continue  # the answers of a server that does not know the command
        played, diverged = Played(cached, conversation, cut), False
        for step in conversation:
            if played.session.closed:
                break
            where = f"{server} {name} step {step['step']}: {step['what']}"
            said = played.step(step)
            kind = "diverged" if diverged else step["class"]
            count[kind] += 1
            if kind == "contract":
                assert said == recorded(step, said), where
            else:
                due = played.usual(step) if diverged else right(played, step, said)
                assert said == due, where
                # Where ours does not stream as that server did, the rest is another story.
                if step["send_hex"] and recorded(step, said)[:9] != said[:9]:
                    diverged = True
            if said.endswith(CLOSING):
                assert played.session.closed, where
                assert isinstance(played.session.last, Refuse), where
            elif played.truncated(step):
                assert played.session.closed, where
            elif kind == "contract":
                closes = step["closed_after"] or read_as_length_0(step)
                assert played.session.closed == closes, where
    assert dict(count) == compared


# The client


def requests(data: bytes) -> tuple[list[Command], bytes]:
    """The whole commands of what a client sent; a placeholder for what is not a command."""
    found: list[Command] = []
    while len(data) >= 16:
        command = int.from_bytes(data[:8], "big")
        rest = data[16:]
        if command in (1, 5):
            if len(rest) < 8:
                break
            number, rest = int.from_bytes(rest[:8], "big"), rest[8:]
            found.append(Start(number) if command == 1 else EntryQuery(number))
        elif command in (4, 6):
            if len(rest) < 4:
                break
            length = int.from_bytes(rest[:4], "big")
            if not 1 <= length <= 16:
                data = rest[4:]
                continue
            if len(rest) < 4 + length:
                break
            key, rest = rest[4 : 4 + length], rest[4 + length :]
            found.append(StartBookmark(key) if command == 4 else BookmarkQuery(key))
        elif command == 7:
            if len(rest) < 10:
                data = b""
                continue
            first, rest = rest[4 : 4 + rest[3]], rest[4 + rest[3] :]
            last, rest = rest[4 : 4 + rest[3]], rest[4 + rest[3] :]
            found.append(RangeQuery(first, last))
        else:
            found.append(HeaderQuery() if command == 3 else Stop())
        data = rest
    return found, data


def readable(event: object) -> list[str]:
    """An event in the words of the transcripts."""
    match event:
        case ResultReceived(_, number, text):
            return [f"Result {number} {text}"]
        case Header() as header:
            return ["Result 0 OK", header_words(header)]
        case EntryReceived(_, None):
            return ["Result 0 OK", "response 0 type 0xffffffff length 17"]
        case EntryReceived(_, entry):
            assert entry is not None
            words = f"type 0x{entry.type:x} length {17 + len(entry.data)}"
            return ["Result 0 OK", f"response {entry.number} {words}"]
        case RangeReceived(_, last):
            return ["Result 0 OK", f"u64 {last}"]
        case EntriesReceived(batch):
            return [f"entry {e.number} type 0x{e.type:x} length {17 + len(e.data)}" for e in batch]
    raise AssertionError(event)


def header_words(header: Header) -> str:
    return (
        f"Header version {header.version} systemID {header.system_id} "
        f"streamType {header.stream_type} totalLength {header.total_length} "
        f"totalEntries {header.total_entries}"
    )


def rebuilt(step: Step) -> bytes:
    """The bytes of a step; of a long one with zeros for data, as only its sum is recorded."""
    if "recv_hex" in step:
        return bytes.fromhex(step["recv_hex"])
    data = bytearray()
    for line in step["recv"]:
        words = line.split()
        if words[0] == "Result":
            data += encode_result(int(words[1]), " ".join(words[2:]))
        elif words[0] == "u64":
            data += int(words[1]).to_bytes(8, "big")
        else:
            packet = 2 if words[0] == "entry" else 0xFE
            length = int(words[5])
            data += ENTRY_HEAD_STRUCT.pack(packet, length, int(words[3], 16), int(words[1]))
            data += bytes(length - 17)
    assert len(data) == step["recv_len"]
    return bytes(data)


def first_out_of_turn(lines: list[str], due: int | None) -> tuple[int | None, int | None]:
    """Which line is an entry that does not follow, if one is; and the number due at the end."""
    for at, line in enumerate(lines):
        words = line.split()
        if words[0] == "entry":
            if due is not None and int(words[1]) != due:
                return at, due
            due = int(words[1]) + 1
    return None, due


def read(connection: ClientConnection, data: bytes, size: int) -> list[str]:
    lines: list[str] = []
    for at in range(0, len(data), size):
        connection.feed(data[at : at + size])
        while (event := connection.next_event()) is not None:
            lines += readable(event)
    return lines


class Client:
    """A client of the recorded server in one conversation."""

    def __init__(self, conversation: list[Step], size: int) -> None:
        header = next(
            (line for s in conversation for line in s["recv"] if "streamType" in line), ""
        )
        stream_type = int(header.split()[6]) if header else 1
        self.connection = ClientConnection(stream_type)
        self.size = size
        self.unsent = b""
        self.due: int | None = None

    def play(self, step: Step, where: str) -> str:
        commands, self.unsent = requests(self.unsent + bytes.fromhex(step["send_hex"]))
        results = sum(line.startswith("Result") for line in step["recv"])
        commands += [Stop()] * (results - len(commands))
        for command in commands:
            self.connection.request(command)
            if isinstance(command, Start | StartBookmark) and "Result 0 OK" in step["recv"]:
                self.due = command.from_entry if isinstance(command, Start) else None
        data = rebuilt(step)
        size = self.size if len(data) < 50_000 else max(self.size, 4099)
        wrong, self.due = first_out_of_turn(step["recv"], self.due)
        if wrong is None:
            assert read(self.connection, data, size) == step["recv"], where
            return "read"
        number = step["recv"][wrong].split()[1]
        with pytest.raises(ProtocolViolation, match=f"{number} where {self.due}"):
            read(self.connection, data, size)
        return "violation"


@pytest.mark.parametrize("size", [1 << 30, 1, 13])
@pytest.mark.parametrize(
    "server, outcomes",
    [
        ("reference", {"read": 566, "violation": 17}),
        ("older", {"read": 145, "violation": 9}),
        ("fork", {"read": 100, "violation": 4}),
    ],
)
def test_the_client_reads_what_servers_say(
    cached: Golden, server: str, outcomes: dict[str, int], size: int
) -> None:
    count: Counter[str] = Counter()
    for name, conversation in cached.transcript(server).items():
        client = Client(conversation, size)
        for step in conversation:
            if step["recv"] and step["recv"][-1].startswith("u64"):
                break  # `to` precedes `from`: no entry follows, and nothing says so
            outcome = client.play(step, f"{server} {name} step {step['step']}: {step['what']}")
            count[outcome] += 1
            if outcome == "violation":
                break
    assert dict(count) == outcomes
