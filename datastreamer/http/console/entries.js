// Entries: a page of them, which may follow the head; and one entry, raw and decoded.

import {
  BOOKMARK, bytesOf, cannotContinue, copyable, dump, el, follow, formats, integer, json, keyName, lines, note, paused,
  put, Refused, request, save, size, table, typeName, typeNames, typeOf, utc,
} from "./core.js"

const PAGE = 50
// With a filter, entries looked through for one page.
const SCANNED = 200_000
const SCAN = 10_000
// A page ends early if its entries are large, and a row keeps this much of its data.
const PAGE_BYTES = 8 << 20
const PREVIEW = 2 + 2 * 48
const DUMPED = 4096
const DRAW_MS = 250

const preview = ({ number, type, length, data }) => ({ number, type, length, data: data.slice(0, PREVIEW) })

// Up to a page of entries from `first` on, and where the next page begins.
async function page(first, types, signal) {
  const filter = types.map((type) => `&type=${type}`).join("")
  const rows = []
  let next = first
  let bytes = 0
  const until = first + (types.length ? SCANNED : PAGE)
  while (next < until && rows.length < PAGE) {
    const limit = types.length ? SCAN : PAGE
    const stop = new AbortController()
    const path = `/v1/entries?from=${next}&limit=${limit}${filter}`
    const answer = await request(path, { signal: AbortSignal.any([signal, stop.signal]) })
    if (!answer.ok) throw new Refused(answer.status, "the stream is not served now")
    let cut = false
    try {
      for await (const line of lines(answer)) {
        const row = preview(JSON.parse(line))
        rows.push(row)
        bytes += line.length
        cut = rows.length >= PAGE || bytes > PAGE_BYTES
        if (cut) {
          next = row.number + 1
          stop.abort()
          break
        }
      }
    } catch (error) {
      if (signal.aborted || rows.length === 0) throw error
      return { rows, next: null, error }
    }
    if (cut) break
    if (!answer.headers.get("Link")) return { rows, next: null }
    next += limit
  }
  return { rows, next }
}

function typesOf(text, stream) {
  return text.split(/[\s,]+/).filter(Boolean).map((word) => {
    const type = typeOf(word, stream)
    if (type === null) throw new Refused(0, `a type is a number or a name such as ${typeNames(stream).join(", ")}, not ${word}; separate several by commas`)
    return type
  })
}

export async function entries(main, signal, name, argument, query) {
  const stream = await json("/v1/stream", { signal })
  const filter = el("input", { placeholder: `Types, e.g. ${typeNames(stream).slice(1, 2)}`, "aria-label": "Filter by type", size: 20, list: "types" })
  const live = el("button", { type: "button", "aria-pressed": "false" }, "Follow head")
  const first = el("button", { type: "button" }, "First")
  const back = el("button", { type: "button" }, "Earlier")
  const on = el("button", { type: "button" }, "Later")
  const wrong = el("p.bad", { role: "alert", hidden: true })
  const body = el("tbody")
  const empty = el("p.empty", { hidden: true })
  const foot = el("p.foot", { role: "status" })
  const panel = el("section.panel", { hidden: true, "aria-label": "Entry" })
  const links = el("span")
  const columns = [["Number", "c-number.n"], ["Type", "c-type"], ["Bytes", "c-length.n.optional"], ["Data", "data"]]
  const split = el("div.split", {},
    el("div", {}, table("Entries", columns, body, empty), el("div.title", {}, foot, links)), panel)
  main.replaceChildren(
    el("div.title", {}, el("h1", {}, "Entries"), wrong),
    el("div.tools", {},
      el("datalist", { id: "types" }, ...typeNames(stream).map((value) => el("option", { value }))),
      el("span.grow", {}, filter), first, back, on, live),
    split,
  )

  let types = []
  let rows = []
  let start = 0
  let next = null
  let selected = null
  let turn = new AbortController()
  let frame = 0

  // One load, or one following, at a time.
  function begin() {
    turn.abort()
    turn = new AbortController()
    signal.addEventListener("abort", () => turn.abort(), { once: true })
    wrong.hidden = true
    return turn.signal
  }

  async function failed(error) {
    if (error.name === "AbortError") return
    if (!(error instanceof Refused)) {
      // An answer that ends before its end does not say why: the next entry may be damaged.
      const next = rows.length ? rows.at(-1).number + 1 : start
      await json(`/v1/entries/${next}`, { signal }).catch((why) => why.status === 500 && (error = why))
    }
    wrong.hidden = false
    empty.hidden = true
    put(wrong, error instanceof Refused ? error.message : "The server cannot be reached.")
  }

  function draw() {
    frame = 0
    while (body.rows.length > rows.length) body.deleteRow(-1)
    while (body.rows.length < rows.length) {
      const row = body.insertRow()
      row.append(el("td.n", {}, el("a")), el("td"), el("td.n.optional"), el("td.mono"))
    }
    const following = live.getAttribute("aria-pressed") === "true"
    rows.forEach((each, index) => {
      // While it follows, the newest entry is on top, where it can be seen.
      const row = body.rows[following ? rows.length - 1 - index : index]
      const [link] = row.cells[0].children
      put(link, integer(each.number))
      link.setAttribute("href", `#entry/${each.number}${suffix()}`)
      put(row.cells[1], typeName(each.type, stream))
      put(row.cells[2], integer(each.length))
      put(row.cells[3], each.type === BOOKMARK ? keyName(each.data, stream) : each.data)
      row.setAttribute("aria-selected", String(each.number === selected))
    })
    empty.hidden = rows.length > 0
    put(empty, following ? "Waiting for the next entry." : types.length ? "No entry of these types here." : "The stream has no entries here.")
    const range = rows.length ? `Entries ${integer(rows[0].number)} to ${integer(rows.at(-1).number)}` : ""
    put(foot, following ? `${range}${range && ", "}newest first, following the head` : range)
    links.replaceChildren(rows.length ? formats(paths()) : "")
    first.disabled = start === 0 && !following
    back.disabled = !following && start === 0
    on.disabled = following || next === null
  }

  function drawSoon() {
    frame ||= setTimeout(() => {
      frame = 0
      if (body.rows.length < PAGE || !paused(split)) draw()
      else {
        put(foot, "Newer entries wait while you read: move the pointer off the list and scroll up.")
        drawSoon()
      }
    }, DRAW_MS)
  }

  // What the address says of the filter, and the shown entries in other forms.
  const suffix = () => (types.length ? `?type=${encodeURIComponent(filter.value.trim())}` : "")

  function paths() {
    const [from, to] = [rows[0].number, rows.at(-1).number]
    const path = (format) => `/v1/entries?from=${from}&to=${to}${types.map((type) => `&type=${type}`).join("")}&format=${format}`
    return { ...(to - from < SCAN && { JSON: path("json") }), NDJSON: path("ndjson"), Arrow: path("arrow") }
  }

  async function load(from) {
    const mine = begin()
    live.setAttribute("aria-pressed", "false")
    try {
      const found = await page(from, types, mine)
      start = from
      rows = found.rows
      next = found.next
      draw()
      if (found.error) failed(found.error)
    } catch (error) {
      if (!mine.aborted) failed(error)
    }
  }

  async function followHead() {
    const mine = begin()
    live.setAttribute("aria-pressed", "true")
    try {
      const { total_entries: total } = await json("/v1/stream", { signal: mine })
      const from = start = Math.max(0, total - PAGE)
      rows = []
      draw()
      await follow(from, {
        entries(added) {
          const chosen = types.length ? added.filter((row) => types.includes(row.type)) : added
          rows = [...rows, ...chosen.map(preview)].slice(-PAGE)
          drawSoon()
        },
        updated(changed) {
          for (const row of changed.map(preview)) {
            const at = rows.findIndex((each) => each.number === row.number)
            if (at >= 0) rows[at] = row
          }
          draw()
        },
        truncated(left) {
          rows = rows.filter((row) => row.number < left)
          wrong.hidden = false
          put(wrong, `The stream was truncated to ${integer(left)} entries.`)
          draw()
        },
        failed,
        begun: () => (wrong.hidden = true),
      }, mine)
    } catch (error) {
      if (mine.aborted) return
      if (cannotContinue(error)) followHead()
      else failed(error)
    }
  }

  filter.addEventListener("change", () => {
    try {
      typesOf(filter.value, stream)
    } catch (error) {
      failed(error)
      return
    }
    const text = filter.value.trim()
    const shown = location.hash.slice(1).split("?")[0]
    location.hash = `${shown}${text && `?type=${encodeURIComponent(text)}`}`
  })
  live.addEventListener("click", () => {
    if (live.getAttribute("aria-pressed") === "true") load(rows[0]?.number ?? 0)
    else location.hash === `#entries${suffix()}` ? followHead() : (location.hash = `entries${suffix()}`)
  })
  first.addEventListener("click", () => load(0))
  back.addEventListener("click", () => load(Math.max(0, (rows[0]?.number ?? start) - PAGE)))
  on.addEventListener("click", () => load(next))
  body.addEventListener("click", (event) => {
    const link = event.target.closest("tr")?.querySelector("a")
    if (link && !event.target.closest("a") && !getSelection().toString()) location.hash = link.hash.slice(1)
  })
  // A page in the background keeps no connection open.
  document.addEventListener("visibilitychange", () => {
    if (live.getAttribute("aria-pressed") !== "true") return
    if (document.visibilityState === "hidden") turn.abort()
    else followHead()
  }, { signal })

  async function show(number) {
    selected = number
    panel.hidden = false
    split.classList.add("open")
    try {
      await detail(panel, number, stream, signal)
    } catch (error) {
      if (signal.aborted || selected !== number) return
      panel.replaceChildren(note(error instanceof Refused ? error.message : "The server cannot be reached.", "bad"))
      if (error.status === 404) return rows.length ? draw() : followHead()
    }
    const at = rows.findIndex((row) => row.number === number)
    if (at < 0) await load(Math.max(0, number - Math.floor(PAGE / 4)))
    draw()
  }

  function update(view, [argument], parameters) {
    const text = parameters.get("type") ?? ""
    const before = String(types)
    try {
      types = typesOf(text, stream)
    } catch (error) {
      failed(error)
      return
    }
    filter.value = text
    if (String(types) !== before) rows = []
    if (view === "entry") {
      if (/^\d+$/.test(argument ?? "")) show(Number(argument))
      else failed(new Refused(0, "the address names no entry"))
      return
    }
    selected = null
    panel.hidden = true
    split.classList.remove("open")
    if (/^\d+$/.test(argument ?? "")) load(Number(argument))
    else followHead()
  }

  draw()
  update(name, argument, query)
  return update
}

async function detail(panel, number, stream, signal) {
  const entry = await json(`/v1/entries/${number}?decode=zkevm`, { signal })
  const bytes = bytesOf(entry.data)
  const shown = el("pre", { tabindex: "0", "aria-label": "Bytes" }, dump(bytes.subarray(0, DUMPED)) || "no data")
  const more = el("button", { type: "button", hidden: bytes.length <= DUMPED,
    onclick: () => ((shown.textContent = dump(bytes)), (more.hidden = true)) }, `Show all ${size(bytes.length)}`)
  const bytesFile = el("button", { type: "button", onclick: () => save(`/v1/entries?from=${number}&to=${number}&format=raw`, `entry-${number}.bin`) }, "Save bytes")
  const close = el("a.rest", { href: "#entries" }, "Close")
  const title = `Entry ${integer(number)}`
  const facts = el("dl", {},
    el("dt", {}, "type"), el("dd", {}, typeName(entry.type, stream)),
    el("dt", {}, "bytes"), el("dd", {}, integer(entry.length)),
    ...(entry.time ? [el("dt", {}, "time"), el("dd", {}, utc(Date.parse(entry.time) / 1000))] : []))
  if (entry.type === BOOKMARK) facts.append(el("dt", {}, "key"), el("dd", {}, copyable(keyName(entry.data, stream))))
  panel.replaceChildren(
    el("div.title", {}, el("h1", {}, title),
      number > 0 ? el("a", { href: `#entry/${number - 1}` }, "Previous") : el("span.dim", {}, "Previous"),
      el("a", { href: `#entry/${number + 1}` }, "Next"),
      formats({ JSON: `/v1/entries/${number}?decode=zkevm` }), close),
    facts,
    el("div.pair", {},
      el("div", {}, el("h2", {}, "Bytes"), shown, el("p.foot", {}, more, " ", bytesFile)),
      el("div", {}, el("h2", {}, entry.kind ?? "Decoded"), decoded(entry))),
  )
}

function decoded(entry) {
  if (entry.error) return el("p.warn", {}, `Cannot be decoded: ${entry.error}`)
  if (!entry.fields) return el("p.dim", {}, "The type is not that of a zkEVM event.")
  return fields(entry.fields)
}

export function fields(values) {
  const list = el("dl")
  for (const [name, value] of Object.entries(values)) {
    const text = value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value)
    list.append(el("dt", {}, name), el("dd.mono", {}, text.length > 2000 ? `${text.slice(0, 2000)}…` : text))
  }
  return list
}
