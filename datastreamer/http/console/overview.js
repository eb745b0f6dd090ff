// The overview: what is not well, the server, its last hour, clients by state, a relay's upstreams.

import { age, el, every, integer, json, put, rate, size, utc } from "./core.js"

const HOUR = 3600
const STATES = ["live", "catch-up", "idle", "draining"]

function card(title, ...kinds) {
  const big = el("p.big", {}, "–")
  const sub = el("p.sub")
  return { big, sub, node: el(`section.${["card", ...kinds].join(".")}`, {}, el("h2", {}, title), big, sub) }
}

const SVG = "http://www.w3.org/2000/svg"

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name)
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value)
  return made
}

// The number at or above `value` that an axis ends with: 1, 2 or 5 times a power of ten (of 1,024
// and two, for bytes).
function roundUp(value, unit) {
  const base = unit === "bytes" ? 1024 ** Math.floor(Math.log(Math.max(value, 1)) / Math.log(1024)) : 1
  const power = 10 ** Math.floor(Math.log10(value / base))
  return base * power * [1, 2, 5, 10].find((each) => each * power * base >= value)
}

const SHOWN = {
  rate: (value) => rate(value, "entries"),
  bytes: (value) => rate(value, "bytes"),
  count: integer,
  seconds: (value) =>
    value == null ? "–" : value >= 1 ? `${value} s` : value >= 0.001 ? `${+(value * 1000).toPrecision(3)} ms` : `${Math.round(value * 1e6)} µs`,
}

// A chart of the column `at` of the samples.
function chart(title, at, unit) {
  const shown = SHOWN[unit]
  const now = el("p.big", {}, "–")
  const marks = ["", "", "0"].map((text) => el("span", {}, text))
  const times = [60, 45, 30, 15, 0].map((minutes) => el("span", {}, minutes ? `−${minutes} min` : "now"))
  const area = svg("path", { class: "area" })
  const stroke = svg("path", { class: "stroke" })
  const drawing = svg("svg", { class: "chart", viewBox: `0 0 ${HOUR} 100`, preserveAspectRatio: "none", role: "img" })
  drawing.append(svg("path", { class: "base", d: `M0 .5H${HOUR}M0 50H${HOUR}M0 99.5H${HOUR}` }), area, stroke)
  const node = el("section.card.wide", {}, el("div.head", {}, el("h2", {}, title), now),
    el("div.plot", {}, el("div.marks", {}, ...marks), drawing), el("div.axis", {}, ...times))
  return {
    node,
    draw(samples, end, every) {
      const known = samples.filter((each) => each[at] !== null)
      const most = Math.max(...known.map((each) => each[at]), 0)
      const top = most ? roundUp(most, unit) : 0
      put(now, shown(samples.at(-1)?.[at]))
      put(marks[0], top ? shown(top) : "")
      put(marks[1], top ? shown(top / 2) : "")
      drawing.setAttribute("aria-label", `${title} of the last hour, at most ${shown(most)}`)
      const x = (each) => (HOUR - (end - each[0])).toFixed(0)
      const y = (each) => (99 - (top ? (each[at] / top) * 98 : 0)).toFixed(1)
      // A part of the line for each run of samples without a gap.
      const runs = []
      for (const each of known) {
        if (!runs.length || each[0] - runs.at(-1).at(-1)[0] > 2.5 * every) runs.push([])
        runs.at(-1).push(each)
      }
      const lines = runs.map((run) => `M${Number(x(run[0])) - every} ${y(run[0])}L${run.map((each) => `${x(each)} ${y(each)}`).join("L")}`)
      stroke.setAttribute("d", lines.join(""))
      area.setAttribute("d", runs.map((run, index) =>
        `${lines[index]}L${x(run.at(-1))} 100L${Number(x(run[0])) - every} 100Z`).join(""))
    },
  }
}

function upstreamRow(each) {
  const kind = { "in-use": "good", lost: "bad", "set-aside": "bad" }[each.state] ?? "dim"
  const lag = each.lag_entries == null ? "lag unknown" : `${integer(each.lag_entries)} entries behind`
  return [el("dt.mono", {}, each.upstream),
    el("dd", {}, el(`span.${kind}`, {}, each.state), ` for ${age(each.seconds)}, ${lag}`,
      each.reason && el("p.dim", {}, each.reason))]
}

function problem(each) {
  return el(`section.problem.${each.severity}`, { role: "alert" }, el("h2", {}, each.text), el("p", {}, each.advice))
}

// What a stream without entries shows: how to write one.
function howToWrite({ path, role }) {
  const card = el("section.card.all", {}, el("h2", {}, "The stream is empty"))
  if (role === "relay") {
    card.append(el("p", {}, "The entries of its upstream appear here as they arrive."))
    return card
  }
  card.append(
    el("p", {}, "Entries appear here as they are committed. A Python program that writes the stream serves it, too; run it in place of this server:"),
    el("pre", {}, `from datastreamer import StreamServer\n\nwith StreamServer(${JSON.stringify(path)}) as server:\n    server.stream.append(1, b"hello")\n    input("Enter ends it")`),
    el("p.gap", {}, "Other programs write over the network, to a server that was started with --publish-token-file TOKENS:"),
    el("pre", {}, `echo '{"type": 1, "text": "hello"}' | datastreamer append tcp://${location.hostname}:6900 --token-file TOKENS`))
  return card
}

function pairs(list, facts) {
  if (list.childElementCount !== 2 * Object.keys(facts).length) {
    list.replaceChildren(...Object.keys(facts).flatMap((name) => [el("dt", {}, name), el("dd")]))
  }
  Object.values(facts).forEach((value, at) => put(list.children[2 * at + 1], value))
}

export async function overview(main, signal) {
  const head = card("Head")
  const commit = card("Last commit")
  const file = card("Size")
  const lag = card("Bookmark index")
  const charts = [
    chart("Entries per second", 1, "rate"), chart("Bytes per second", 2, "bytes"), chart("Clients", 3, "count"),
    chart("Largest lag of a client, entries", 4, "count"), chart("99 % of commits within", 5, "seconds"),
  ]
  const connected = card("Clients", "wide")
  const archive = card("Archive", "all")
  archive.node.hidden = true
  const about = el("dl")
  const upstreams = el("dl")
  const relay = el("section.card.all", { hidden: true }, el("h2", {}, "Upstreams"), upstreams)
  const problems = el("div.problems")
  const empty = el("div.cards.gap", { hidden: true })
  const since = el("p.sub")
  connected.sub.replaceChildren(el("a", { href: "#clients" }, "Show them"))
  main.replaceChildren(
    el("div.title", {}, el("h1", {}, "Overview"), since),
    problems, empty,
    el("div.cards", {}, head.node, commit.node, file.node, lag.node, archive.node, relay, ...charts.map((each) => each.node),
      connected.node, el("section.card.wide", {}, el("h2", {}, "Stream"), about)),
  )
  const states = Object.fromEntries(STATES.map((name) => [name, el("dd")]))
  connected.node.append(el("dl", {}, ...STATES.flatMap((name) => [el("dt", {}, name), states[name]])))
  let found = null
  let at = 0

  every(1000, signal, async () => {
    const stream = await json("/v1/stream", { signal })
    put(head.big, integer(stream.total_entries))
    put(head.sub, stream.total_entries === 1 ? "entry" : "entries")
    put(file.big, size(stream.total_length))
    const pages = Math.ceil((stream.total_length - 4096) / 1048576)
    put(file.sub, pages === 1 ? "1 page" : `${integer(pages)} pages`)
    empty.hidden = stream.total_entries > 0
    if (found && !empty.hidden && !empty.firstChild) empty.replaceChildren(howToWrite(found))
    const sync = { commit: "each commit is on disk", os: "left to the operating system" }
    pairs(about, {
      version: stream.version, "system id": stream.system_id, "stream type": stream.stream_type,
      epoch: stream.epoch,
      sync: stream.sync === null ? "decided by the process that writes" : (sync[stream.sync] ?? `every ${stream.sync} ms`),
    })
  })

  every(2000, signal, async () => {
    found = await json("/v1/overview", { signal })
    at = found.time
    problems.replaceChildren(...found.problems.map(problem))
    relay.hidden = !found.upstreams
    upstreams.replaceChildren(...(found.upstreams ?? []).flatMap(upstreamRow))
    archive.node.hidden = !found.archive
    if (found.archive) {
      const { entries, lag_bytes: lacks, lag_seconds: since, generation } = found.archive
      put(archive.big, lacks ? `lacks ${size(lacks)}` : "complete")
      put(archive.sub, `${lacks ? `for ${age(since)}, ` : ""}${integer(entries)} entries, generation ${generation}`)
    }
    for (const each of charts) each.draw(found.samples.filter(([time]) => time > at - HOUR), at, found.sample_seconds)
    put(since, [found.name, found.role, found.path, `version ${found.server_version}`, `serving for ${age(found.uptime_seconds)}`].join(" · "))
    put(commit.big, found.last_commit === null ? "–" : `${age(Math.max(0, at - found.last_commit))} ago`)
    put(commit.sub, found.last_commit === null ? "its time is not known" : utc(found.last_commit))
  })

  every(2000, signal, async () => {
    const state = await json("/v1/clients?limit=0", { signal })
    put(connected.big, integer(Object.values(state.connected).reduce((one, other) => one + other, 0)))
    for (const name of STATES) put(states[name], integer(state.connected[name] ?? 0))
    put(lag.big, state.index_lag_entries === 0 ? "complete" : integer(state.index_lag_entries))
    put(lag.sub, state.index_lag_entries ? "entries behind the head" : "")
  })
}
