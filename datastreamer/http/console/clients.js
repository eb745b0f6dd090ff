// The clients of the stream protocol: sorted by lag, with a filter.

import { age, el, every, integer, json, put, size } from "./core.js"

const MOST = 1000
const COLUMNS = [
  ["Client", "c-client"], ["State", "c-state"], ["Entry", "n optional"], ["Lag", "n"],
  ["Lag in bytes", "n optional"], ["Connected", "n optional"],
]

export async function clients(main, signal) {
  const filter = el("input.grow", { type: "search", placeholder: "Filter by address, name or state", "aria-label": "Filter" })
  const body = el("tbody")
  const count = el("p.sub", { role: "status" })
  const empty = el("p.empty", { hidden: true })
  const cells = COLUMNS.map(([title, kind]) => el(`th.${kind.replace(" ", ".")}`, { scope: "col" }, title))
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...cells)), body)
  main.replaceChildren(
    el("div.title", {}, el("h1", {}, "Clients"), count),
    el("div.tools", {}, filter),
    el("div.table", {}, table, empty),
  )
  let state = null

  function draw() {
    if (!state) return
    const words = filter.value.toLowerCase()
    const found = state.clients.filter((each) => `${each.client} ${each.state}`.toLowerCase().includes(words))
    while (body.rows.length > found.length) body.deleteRow(-1)
    while (body.rows.length < found.length) {
      const row = body.insertRow()
      for (const [, kind] of COLUMNS) row.append(el(`td.${kind.replace(" ", ".")}`))
    }
    found.forEach((each, at) => {
      const row = body.rows[at].cells
      put(row[0], each.client)
      put(row[1], each.state)
      put(row[2], integer(each.entry))
      put(row[3], integer(each.lag_entries))
      put(row[4], size(each.lag_bytes))
      put(row[5], age(each.seconds))
      row[3].className = each.lag_entries > 1000 ? "n warn" : "n"
      row[0].title = each.client
    })
    const total = Object.values(state.connected).reduce((one, other) => one + other, 0)
    const listed = state.clients.length
    const rest = listed < total ? `; the list, and its filter, has the ${integer(listed)} with the largest lag` : ""
    put(count, `${integer(found.length)} of ${integer(total)} connected, by lag${rest}`)
    empty.hidden = found.length > 0
    put(empty, total ? "No client matches the filter." : "No client is connected.")
  }

  filter.addEventListener("input", draw)
  every(2000, signal, async () => {
    state = await json(`/v1/clients?limit=${MOST}`, { signal })
    draw()
  })
}
