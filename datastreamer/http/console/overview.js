// The overview: the head and its pace, the clients by state, a relay's upstreams, readiness.

import { age, el, every, integer, json, put, rate, request, size } from "./core.js"

const SECONDS = 300
const STATES = ["live", "catch-up", "idle", "draining"]
// The pace since the page was loaded, also while another view is shown.
const history = []

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

function chart(title, unit) {
  const now = el("p.big", {}, "–")
  const most = el("span", {}, "")
  const area = svg("path", { class: "area" })
  const stroke = svg("path", { class: "stroke" })
  const drawing = svg("svg", {
    class: "chart", viewBox: `0 0 ${SECONDS} 100`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${title} of the last five minutes`,
  })
  drawing.append(svg("path", { class: "base", d: `M0 99.5H${SECONDS}` }), area, stroke)
  const axis = el("div.axis", {}, el("span", {}, "5 min ago"), most, el("span", {}, "now"))
  const node = el("section.card.wide", {}, el("h2", {}, title), now, drawing, axis)
  return {
    node,
    draw(key) {
      const known = history.filter((each) => each[key] !== null)
      const top = Math.max(...known.map((each) => each[key]), 0)
      const last = known.at(-1)
      put(now, rate(last?.[key], unit))
      put(most, top ? `most ${rate(top, unit)}` : "")
      const end = last?.at ?? 0
      const points = known.map((each) => {
        const x = SECONDS - (end - each.at)
        return `${x.toFixed(1)} ${(99 - (top ? (each[key] / top) * 92 : 0)).toFixed(1)}`
      })
      const line = points.length > 1 ? `M${points.join("L")}` : ""
      stroke.setAttribute("d", line)
      area.setAttribute("d", line && `${line}L${SECONDS} 100L${points[0].split(" ")[0]} 100Z`)
    },
  }
}

function note(stream) {
  const at = performance.now() / 1000
  const before = history.at(-1)
  const seconds = before ? at - before.at : 0
  const forward = before && stream.total_entries >= before.entries && seconds < 10
  history.push({
    at,
    entries: stream.total_entries,
    bytes: stream.total_length,
    entryRate: forward ? (stream.total_entries - before.entries) / seconds : null,
    byteRate: forward ? Math.max(0, stream.total_length - before.bytes) / seconds : null,
    moved: before && stream.total_entries !== before.entries ? at : (before?.moved ?? null),
  })
  while (at - history[0].at > SECONDS) history.shift()
}

function upstreamRow(each) {
  const kind = { "in-use": "good", lost: "bad", "set-aside": "bad" }[each.state] ?? "dim"
  const lag = each.lag_entries == null ? "lag unknown" : `${integer(each.lag_entries)} entries behind`
  return [el("dt.mono", {}, each.upstream), el("dd", {}, el(`span.${kind}`, {}, each.state), `, ${lag}`)]
}

export async function overview(main, signal) {
  const { upstreams: isRelay } = await json("/v1/clients?limit=0", { signal })
  const head = card("Head")
  const commit = card("Last commit")
  const file = card("Size")
  const lag = card("Bookmark index")
  const pace = chart("Entries per second", "entries")
  const volume = chart("Bytes per second", "bytes")
  const ready = card("Readiness")
  const connected = card("Clients")
  const about = el("dl")
  const upstreams = el("dl")
  const relay = el("section.card.all", { hidden: !isRelay }, el("h2", {}, "Upstreams"), upstreams)
  connected.sub.replaceChildren(el("a", { href: "#clients" }, "Show them"))
  main.replaceChildren(
    el("div.title", {}, el("h1", {}, "Overview")),
    el("div.cards", {}, head.node, commit.node, file.node, lag.node, relay, pace.node, volume.node,
      ready.node, connected.node, el("section.card.wide", {}, el("h2", {}, "Stream"), about)),
  )
  const states = Object.fromEntries(STATES.map((name) => [name, el("dd")]))
  const list = el("dl", {}, ...STATES.flatMap((name) => [el("dt", {}, name), states[name]]))
  connected.node.append(list)

  every(1000, signal, async () => {
    const stream = await json("/v1/stream", { signal })
    note(stream)
    put(head.big, integer(stream.total_entries))
    put(head.sub, stream.total_entries === 1 ? "entry" : "entries")
    const { at, moved } = history.at(-1)
    put(commit.big, moved === null ? "–" : `${age(at - moved)} ago`)
    put(commit.sub, moved === null ? "none since this page was opened" : "")
    put(file.big, size(stream.total_length))
    const pages = Math.ceil((stream.total_length - 4096) / 1048576)
    put(file.sub, pages === 1 ? "1 page" : `${integer(pages)} pages`)
    pace.draw("entryRate")
    volume.draw("byteRate")
    const sync = { commit: "each commit is on disk", os: "left to the operating system" }
    const facts = {
      version: stream.version, "system id": stream.system_id, "stream type": stream.stream_type,
      epoch: stream.epoch,
      sync: stream.sync === null ? "written by another process" : (sync[stream.sync] ?? `every ${stream.sync} ms`),
    }
    if (about.childElementCount === 0) {
      about.append(...Object.keys(facts).flatMap((name) => [el("dt", {}, name), el("dd")]))
    }
    Object.values(facts).forEach((value, at) => put(about.children[2 * at + 1], value))
  })

  every(2000, signal, async () => {
    const state = await json("/v1/clients?limit=0", { signal })
    put(connected.big, integer(Object.values(state.connected).reduce((one, other) => one + other, 0)))
    for (const name of STATES) put(states[name], integer(state.connected[name] ?? 0))
    put(lag.big, state.index_lag_entries === 0 ? "complete" : integer(state.index_lag_entries))
    put(lag.sub, state.index_lag_entries ? "entries behind the head" : "")
    if (state.upstreams) upstreams.replaceChildren(...state.upstreams.flatMap(upstreamRow))
  })

  every(2000, signal, async () => {
    const answer = await request("/readyz", { signal })
    const why = (await answer.text()).trim()
    ready.big.className = answer.ok ? "big good" : "big warn"
    put(ready.big, answer.ok ? "ready" : "not ready")
    put(ready.sub, answer.ok ? "" : why)
  })
}
