"""The console in a real browser. Skipped where Debian's chromium or playwright is missing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from datastreamer.cli.demo import DemoSequencer
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.format import page_start
from datastreamer.http import console as console_files
from datastreamer.http.options import HttpOptions
from datastreamer.service.blocking_relay import BlockingRelay
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of
from datastreamer.zkevm.decoding import decode, encode
from datastreamer.zkevm.events import L2Block, Transaction
from datastreamer.zkevm.transactions import keccak
from tests.network.fixtures import append
from tests.programs import needs

pytestmark = needs("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield made
        made.close()


class Console:
    """A page, and what it must not do: errors, violations of its policy, requests to elsewhere."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        self.lost = False
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._log)
        page.on("request", self._request)

    def _log(self, message: Any) -> None:
        # A browser logs each answer that is an error, and each server that is lost.
        known = "Failed to load resource" in message.text or (self.lost and "ERR_" in message.text)
        if message.type in ("error", "warning") and not known:
            self.faults.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "blob:")):
            self.faults.append(f"a request to {request.url}")

    def show(self, view: str) -> None:
        self.page.goto(f"{self.url}/#{view}")

    def rows(self) -> Any:
        return self.page.locator("tbody tr")

    def row(self, number: int) -> Any:
        return self.page.locator(f'tbody a[href="#entry/{number}"]')


class Opened:
    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.consoles: list[Console] = []

    def __call__(self, url: str, **context: Any) -> Console:
        page = self._browser.new_context(**context).new_page()
        page.set_default_timeout(20_000)
        self.consoles.append(Console(page, url))
        return self.consoles[-1]


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """Opens consoles, and demands in the end that they did nothing wrong."""
    made = Opened(browser)
    yield made
    for console in made.consoles:
        console.page.context.close()
        assert console.faults == []


def served(path: Path, port: int = 0, **options: Any) -> StreamServer:
    return StreamServer(
        path, host="127.0.0.1", port=0, in_process=True, http=HttpOptions(port=port, **options)
    )


@pytest.fixture
def server(path: Path) -> Iterator[StreamServer]:
    """A server of a zkEVM stream of 30 blocks."""
    with DataStream.create(path, version=3, sync="os"):
        pass
    with served(path) as made:
        sequencer = DemoSequencer(made.stream)
        for _ in range(30):
            sequencer.write()
        yield made


def url_of(server: StreamServer) -> str:
    return f"http://127.0.0.1:{server.http_port}"


def test_the_overview(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    console.page.goto(console.url)
    total = server.stream.total_entries
    card = console.page.locator(".card").first.locator(".big")
    expect(card).to_have_text(f"{total:,}")
    expect(console.page.locator("#state-text")).to_have_text("serving")
    append(server.stream, (7, b"one"))
    expect(card).to_have_text(f"{total + 1:,}")
    expect(console.page.locator(".card").nth(1).locator(".big")).to_have_text(re.compile("ago"))
    facts = console.page.locator(".title .sub")
    expect(facts).to_contain_text(f"server · {server.stream.path} · version ")
    assert console.page.locator(".problem").count() == 0


def test_what_is_not_well_is_first(path: Path, opened: Opened) -> None:
    """A relay without its upstream, of a stream without entries."""
    with DataStream.create(path, stream_type=1):
        pass
    http = HttpOptions(port=0)
    with BlockingRelay(["127.0.0.1:9"], path, host="127.0.0.1", port=0, http=http) as relay:
        console = opened(f"http://127.0.0.1:{relay.http_port}")
        console.page.goto(console.url)
        first = console.page.locator(".problem h2").first
        expect(console.page.locator(".problem", has_text="No upstream for ")).to_be_visible()
        assert first.bounding_box()["y"] < console.page.locator(".card").first.bounding_box()["y"]
        upstream = console.page.locator("dd", has_text="lost for")
        expect(upstream).to_contain_text(re.compile("refused"))


def test_a_damaged_page_among_the_blocks(path: Path, opened: Opened) -> None:
    with DataStream.create(path, version=3, index="memory") as stream:
        sequencer = DemoSequencer(stream)
        for _ in range(30):
            sequencer.write()
        append(stream, *[(99, bytes(1_000_000))] * 2)
        sequencer.write()
    with path.open("r+b") as file:
        file.seek(page_start(1) + 99)
        file.write(b"\x01")
    with served(path) as server:
        console = opened(url_of(server), viewport={"width": 900, "height": 500})
        console.show("blocks")
        damaged = console.rows().first.locator("td").first
        expect(damaged).to_contain_text(re.compile("^damaged at byte .* has to repair the file$"))
        expect(console.rows().nth(1)).to_contain_text("29")
        # The headings remain where the rows scroll.
        console.page.evaluate("scrollTo(0, 600)")
        expect(console.page.locator("th").first).to_be_in_viewport()
        console.show("block/30")
        expect(console.page.locator(".note.bad")).to_contain_text("damaged at byte")
        for view in ("entries", "entries/180"):
            console.show(view)
            expect(console.page.locator(".title .bad")).to_contain_text("damaged at byte")
            expect(console.row(180)).to_be_visible()


def test_an_empty_stream_shows_how_to_write(path: Path, opened: Opened) -> None:
    with served(path) as server:
        console = opened(url_of(server))
        console.page.goto(console.url)
        expect(console.page.get_by_text("The stream is empty")).to_be_visible()
        append(server.stream, (7, b"one"))
        expect(console.page.get_by_text("The stream is empty")).to_be_hidden()


def test_following_live(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    console.show("entries")
    first = console.rows().first
    for _ in range(3):
        total = server.stream.total_entries
        expect(first.locator("a")).to_have_text(f"{total - 1:,}")
        append(server.stream, (7, b"new"))
        expect(first.locator("a")).to_have_text(f"{total:,}")
    assert console.rows().count() == 50


def test_jumping_permalinks_back_and_forward(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    page, panel = console.page, console.page.locator(".panel h1")
    console.show("entries")
    jump = page.get_by_label("Search")
    mark = server.stream.bookmark(bytes.fromhex("0802" + "1005"))
    for text, number in (("12", 12), ("0x08021005", mark)):
        jump.fill(text)
        jump.press("Enter")
        expect(panel).to_have_text(f"Entry {number}")
        expect(page).to_have_url(f"{console.url}/#entry/{number}")
        expect(page.locator('tr[aria-selected="true"] a')).to_have_text(str(number))
    for text, title in (("block:5", "Block 5"), ("batch:4", "Batch 4")):
        jump.fill(text)
        jump.press("Enter")
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    jump.fill("no such bookmark")
    jump.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("there is no bookmark")
    expect(page.get_by_role("alert")).to_contain_text("block:N")  # what the field finds
    for _ in range(3):
        page.go_back()
    expect(panel).to_have_text("Entry 12")
    page.go_forward()
    expect(panel).to_have_text(f"Entry {mark}")
    again = opened(console.url)
    again.show("entry/12")
    expect(again.page.locator(".panel h1")).to_have_text("Entry 12")
    again.page.get_by_role("link", name="Next").click()
    expect(again.page.locator(".panel h1")).to_have_text("Entry 13")


def test_an_entry_beyond_the_head(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    total = server.stream.total_entries
    console.show("entry/9999")
    expect(console.page.locator(".panel")).to_contain_text(f"the stream has {total}")
    expect(console.rows()).to_have_count(50)  # the newest
    expect(console.page.get_by_role("alert")).to_have_count(1)
    console.page.goto("about:blank")
    console.show("entry/x")
    expect(console.page.get_by_role("alert")).to_have_text("the address names no entry")
    expect(console.page.get_by_text("The stream has no entries here.")).to_be_hidden()


def test_raw_and_decoded_side_by_side(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server), viewport={"width": 1600, "height": 900})
    entry = next(each for each in server.stream.entries() if each.type == 3)
    console.show(f"entry/{entry.number}")
    pair = console.page.locator(".pair > div")
    expect(pair).to_have_count(2)
    raw, fields = pair.all()
    expect(raw.locator("pre")).to_contain_text(entry.data[:8].hex(" "))
    expect(fields).to_contain_text("encoded")
    one, other = raw.bounding_box(), fields.bounding_box()
    assert one["x"] + one["width"] <= other["x"]


def test_filters_by_type(server: StreamServer, opened: Opened) -> None:
    append(server.stream, *[(99, b"far")] * 3)
    console = opened(url_of(server))
    console.show("entries/0")
    expect(console.rows()).to_have_count(50)
    types = console.page.get_by_label("Filter by type")
    types.fill(types.get_attribute("placeholder"))
    assert types.evaluate("field => field.scrollWidth <= field.clientWidth")  # nothing is cut
    types.fill("99")
    types.press("Enter")
    expect(console.rows()).to_have_count(3)
    types.fill("transaction, batchend")
    types.press("Enter")
    kinds = console.rows().locator("td:nth-child(2)")
    expect(kinds.first).to_have_text("3 Transaction")
    expect(kinds.nth(1)).to_have_text("4 BatchEnd")
    expect(console.page).to_have_url(re.compile("#entries/0\\?type=transaction"))
    # The filter is part of a link to a colleague.
    again = opened(console.url)
    again.page.goto(console.page.url)
    expect(again.rows()).to_have_count(50)
    expect(again.rows().locator("td:nth-child(2)").nth(1)).to_have_text("4 BatchEnd")
    ndjson = again.page.get_by_role("link", name="NDJSON").get_attribute("href")
    assert "&type=3&type=4&format=ndjson" in ndjson
    types.fill("x")
    types.press("Enter")
    expect(console.page.get_by_role("alert")).to_contain_text("a type is a number or a name")


def test_blocks_and_batches(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    page = console.page
    console.show("block/7")
    expect(page.get_by_role("heading", name="Block 7", exact=True)).to_be_visible()
    cells = page.get_by_role("table", name="Transactions").locator("tbody td")
    expect(cells.first).to_have_text(re.compile("^0x[0-9a-f]{64}$"))
    page.get_by_role("link", name="Next block").click()
    expect(page.get_by_role("heading", name="Block 8", exact=True)).to_be_visible()
    page.get_by_role("link", name=re.compile("^Batch")).click()
    expect(page.get_by_role("table", name="Blocks").locator("tbody tr")).to_have_count(1)
    console.show("block/999")
    expect(page.get_by_role("alert")).to_contain_text("block:999")


def test_the_list_of_blocks_follows_the_head(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    page = console.page
    console.show("blocks")
    first = console.rows().first.locator("td")
    expect(first.first).to_have_text("29")
    expect(first.nth(1)).to_have_text(re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$"))
    sequencer = DemoSequencer(server.stream)
    sequencer.write()
    expect(first.first).to_have_text("30")
    # The list does not move under the pointer.
    console.rows().nth(3).hover()
    sequencer.write()
    expect(page.locator(".foot")).to_contain_text("Newer blocks wait")
    expect(first.first).to_have_text("30")
    page.mouse.move(0, 0)
    expect(first.first).to_have_text("31")
    page.get_by_role("link", name="Older blocks").click()
    expect(first.first).to_have_text("6")
    expect(page.get_by_role("link", name="Older blocks")).to_be_hidden()
    page.get_by_role("link", name="Newest blocks").click()
    expect(first.first).to_have_text("31")


def test_a_transaction(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    page = console.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    console.show("block/7")
    page.get_by_role("table", name="Transactions").locator("tbody a").first.click()
    expect(page.get_by_role("heading", name="Transaction", exact=True)).to_be_visible()
    panel = page.locator(".panel").first
    shown = panel.locator("dd .mono").first.inner_text()
    assert re.fullmatch("0x[0-9a-f]{64}", shown)
    # (The page is drawn again while it is followed: a click may meet an element that is leaving.)
    page.get_by_role("button", name=f"Copy {shown}").dispatch_event("click")
    expect(panel.get_by_role("button", name="Copy").first).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == shown
    expect(panel).to_contain_text("ether for")
    panel.get_by_role("link", name="7", exact=True).click()
    expect(page.get_by_role("heading", name="Block 7", exact=True)).to_be_visible()
    ndjson = page.get_by_role("link", name="NDJSON").get_attribute("href")
    assert len(page.request.get(f"{console.url}{ndjson}").text().splitlines()) == 4
    console.show("tx/0")
    expect(page.get_by_role("alert")).to_contain_text("entry 0 is not a transaction")


def test_well_known_calls_have_their_selectors() -> None:
    hashed = keccak()
    source = (files(console_files) / "calls.js").read_text()
    known = re.findall(r'"([0-9a-f]{8})": "(\w+)\((.*)\)"', source)
    assert len(known) > 10
    for selector, name, parameters in known:
        types = ",".join(each.split()[0] for each in parameters.split(", ") if each)
        assert hashed(f"{name}({types})".encode())[:4].hex() == selector, name


def test_truncation_while_watching(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    console.show("entries")
    total = server.stream.total_entries
    expect(console.row(total - 1)).to_be_visible()
    server.stream.truncate(total - 10)
    expect(console.row(total - 1)).to_have_count(0)
    expect(console.page.get_by_role("alert")).to_contain_text(f"truncated to {total - 10:,}")
    append(server.stream, (7, b"other"))
    expect(console.rows().first.locator("a")).to_have_text(f"{total - 10:,}")


def test_an_update_while_watching(server: StreamServer, opened: Opened) -> None:
    append(server.stream, (7, b"old"), (7, b"last"))
    console = opened(url_of(server))
    console.show("entries")
    total = server.stream.total_entries
    link = console.page.locator(f'a[href="#entry/{total - 2}"]')
    row = console.rows().filter(has=link)
    expect(row).to_contain_text("0x6f6c64")
    server.stream.update_entry(total - 2, 7, b"new")
    expect(row).to_contain_text("0x6e6577")
    assert console.rows().count() == 50


def test_a_restarted_server(path: Path, opened: Opened) -> None:
    with served(path) as server:
        append(server.stream, *[(1, b"one")] * 5)
        port = server.http_port
        console = opened(url_of(server))
        console.show("entries")
        expect(console.row(4)).to_be_visible()
        console.lost = True
    expect(console.page.locator("#state-text")).to_have_text("server not reachable")
    with served(path, port=port or 0) as server:
        append(server.stream, (2, b"two"))
        expect(console.row(5)).to_be_visible()
        expect(console.page.locator("#state-text")).to_have_text("serving")
        assert console.rows().count() == 6


def test_the_keyboard_alone(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    page = console.page
    console.show("overview")
    expect(page.locator(".card").first).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("e")
    expect(page).to_have_url(f"{console.url}/#entries")
    expect(console.rows().first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    expect(page.locator(".panel h1")).to_have_text("Entry 3")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("j")
    expect(page.locator(".panel h1")).to_have_text("Entry 4")
    page.keyboard.press("k")
    expect(page.locator(".panel h1")).to_have_text("Entry 3")
    page.keyboard.press("?")
    expect(page.get_by_role("heading", name="Keyboard", exact=True)).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="Keyboard", exact=True)).to_be_hidden()
    # Every control is reached with the Tab key, and shows that it is.
    page.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))
        assert page.evaluate(
            "document.activeElement === document.body || "
            "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        )
    assert {"Overview", "Clients", "Later", "Follow head", "Previous", "Close"} <= seen


def test_hostile_text_is_text(path: Path, opened: Opened) -> None:
    with DataStream.create(path, version=3, sync="os"):
        pass
    with served(path) as server:
        with server.stream.atomic_op() as op:
            op.add_bookmark(b"<b>x</b><script>")
            op.add_entry(1, b"<img src=x onerror=alert(1)>" * 3)
            op.add_entry(0xFFFFFFFF, "\u202e\u0000\u2028".encode())
            # A block whose fields say anything.
            op.add_bookmark(key_of(3, BookmarkName("block", 0)))
            block = L2Block(number=0, timestamp=2**63, hash=b"<img src=x>", debug="<img src=x>")
            op.add_entry(*encode(block, version=3))
            op.add_entry(*encode(Transaction(encoded=b"<svg onload=alert(1)>"), version=3))
        console = opened(url_of(server))
        console.page.on("dialog", lambda dialog: console.faults.append("a dialog"))
        console.show("entry/0")
        expect(console.page.locator(".panel dd .mono").first).to_have_text("<b>x</b><script>")
        console.show("entry/1")
        expect(console.page.locator(".panel pre")).to_contain_text("<img src=x onerr")
        console.show("block/0")
        expect(console.page.locator(".panel dl").last).to_contain_text("<img src=x>")
        console.show("tx/5")
        expect(console.page.get_by_role("alert")).to_contain_text("not a transaction")
        console.show("blocks")
        expect(console.rows().first).to_contain_text(f"{2**63} s")
        assert console.page.locator("main img, main script, main svg").count() == 0


def test_entries_of_the_largest_size(path: Path, opened: Opened) -> None:
    with served(path) as server:
        append(server.stream, *[(1, b"x" * 1_048_559)] * 12)
        console = opened(url_of(server))
        console.show("entries/0")
        expect(console.row(0)).to_be_visible()
        assert console.rows().count() < 12
        console.page.get_by_role("button", name="Later").click()
        expect(console.row(0)).to_have_count(0)
        console.show("entry/11")
        console.page.get_by_role("button", name=re.compile("Show all")).click()
        expect(console.page.locator(".panel pre")).to_contain_text("fffe0")


def test_a_token_is_asked_for(path: Path, tmp_path: Path, opened: Opened) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("right\n")
    tokens.chmod(0o600)
    with served(path, token_file=tokens) as server:
        append(server.stream, *[(1, b"one")] * 5)
        console = opened(url_of(server))
        console.show("entries")
        field = console.page.locator("#token")
        field.fill("wrong")
        field.press("Enter")
        expect(console.page.locator("#token-wrong")).to_be_visible()
        field.fill("right")
        field.press("Enter")
        expect(console.row(4)).to_be_visible()
        assert "right" not in console.page.url


@pytest.mark.parametrize("width", [360, 900, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overlaps_or_sticks_out(
    server: StreamServer, opened: Opened, width: int, scheme: str
) -> None:
    console = opened(url_of(server), viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = console.page
    for view, sign in (
        ("overview", ".card .big"),
        ("entries", "tbody tr"),
        ("entry/9", ".panel pre"),
        ("blocks", "tbody td"),
        ("block/3", "tbody td"),
        ("tx/18", ".panel dd"),
        (f"hash/0x{bytes(32).hex()}", ".note"),
        (f"address/0x{bytes(20).hex()}", ".note"),
        ("batch/3", "tbody td"),
        ("clients", ".title .sub"),
    ):
        console.show(view)
        expect(page.locator(sign).first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        boxes = [
            box
            for each in page.locator("header a, header p, .tools > *, .card").all()
            if (box := each.bounding_box()) and box["width"] > 1 and box["x"] >= 0
        ]
        for at, one in enumerate(boxes):
            for other in boxes[at + 1 :]:
                apart = (
                    one["x"] + one["width"] <= other["x"] + 0.5
                    or other["x"] + other["width"] <= one["x"] + 0.5
                    or one["y"] + one["height"] <= other["y"] + 0.5
                    or other["y"] + other["height"] <= one["y"] + 0.5
                )
                assert apart, (view, one, other)


@pytest.mark.parametrize("width", [360, 900, 1600])
def test_the_name_of_a_client_is_shown_whole(
    server: StreamServer, opened: Opened, width: int
) -> None:
    name = "<b>" + "a" * 58 + "end"
    with BlockingClient("127.0.0.1", server.port, client_name=name) as client:
        client.header()
        console = opened(url_of(server), viewport={"width": width, "height": 800})
        console.show("clients")
        cell = console.rows().locator("td").first
        expect(cell).to_contain_text(name)
        assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth")
        expect(console.page.get_by_placeholder("name")).to_be_visible()


def test_the_policy_forbids_other_scripts(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    answer = console.page.goto(console.url)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    for file in ("index.html", "console.css", *("core", "main")):
        content = console.page.request.get(f"{console.url}/console/{file}").text()
        assert "http://" not in content.replace("http://www.w3.org/2000/svg", "")
        assert "style=" not in content
        assert not re.search(r"\son\w+=", content)


def test_a_hash_and_an_address_are_found(server: StreamServer, opened: Opened) -> None:
    console = opened(url_of(server))
    page = console.page
    [entry] = [each for each in server.stream.entries(0, 7) if each.type == 3]
    transaction = decode(entry, version=3)
    assert isinstance(transaction, Transaction)
    found = transaction.open()
    assert found.to is not None
    console.show("overview")
    field = page.get_by_label("Search")
    field.fill(found.hash.hex())  # as some programs write it
    field.press("Enter")
    expect(page.get_by_role("heading", name="Transaction", exact=True)).to_be_visible()
    expect(page).to_have_url(f"{console.url}/#hash/0x{found.hash.hex()}")
    page.get_by_role("link", name=f"0x{found.to.hex()}").click()
    expect(page.get_by_role("heading", name="Address", exact=True)).to_be_visible()
    row = page.get_by_role("table", name="Transactions").locator("tbody tr")
    expect(row).to_contain_text(f"0x{found.hash.hex()}")
    # A hash that was cut, and an address of the page that does not exist.
    page.locator("header input, form input").first.fill(f"0x{bytes(19).hex()}")
    page.keyboard.press("Enter")
    expect(page.locator("#search-wrong")).to_contain_text("64 hex digits after 0x")
    console.show("nonsense/5")
    expect(page.get_by_text("There is no page #nonsense/5")).to_be_visible()
    # Nothing is claimed of what was not searched.
    nothing = f"0x{bytes(32).hex()}"
    console.show(f"hash/{nothing}")
    total = f"{server.stream.total_entries:,}"
    expect(
        page.get_by_role("status").filter(has_text=f"has {nothing}. All {total}")
    ).to_be_visible()
