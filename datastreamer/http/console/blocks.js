// Blocks and batches of a zkEVM stream, with their transactions decoded.

import { el, integer, json, note, Refused } from "./core.js"
import { fields } from "./entries.js"

const WEI = 10n ** 18n

// Wei as ether, exactly.
function ether(wei) {
  const value = BigInt(wei)
  const rest = (value % WEI).toString().padStart(18, "0").replace(/0+$/, "")
  return `${(value / WEI).toLocaleString("en")}${rest && "."}${rest}`
}

export async function blocks(main, signal, name, argument) {
  const input = el("input.grow", { placeholder: "Block number, or batch:N", "aria-label": "Block or batch" })
  const shown = el("div", { "aria-live": "polite" })
  main.replaceChildren(
    el("div.title", {}, el("h1", {}, "Blocks")),
    el("div.tools", {}, el("form.grow", { onsubmit: submit }, input, el("button.primary", {}, "Go"))),
    shown,
  )

  function submit(event) {
    event.preventDefault()
    const found = /^(?:(block|batch):)?(\d+)$/.exec(input.value.trim())
    if (found) location.hash = `${found[1] ?? "block"}/${found[2]}`
    else shown.replaceChildren(note("Write the number of a block, block:N or batch:N.", "bad"))
  }

  async function update(view, [number]) {
    try {
      if (!/^\d+$/.test(number ?? "")) {
        const newest = await newestBlock(signal)
        if (newest === null) {
          shown.replaceChildren(el("p.empty", {}, "The stream has no blocks near its head."))
          return
        }
        view = "block"
        number = newest
      }
      const found = await json(`/v1/${view === "batch" ? "batches" : "blocks"}/${number}`, { signal })
      shown.replaceChildren(...(view === "batch" ? batch(found) : block(found)))
    } catch (error) {
      if (signal.aborted) return
      const words = error instanceof Refused ? error.message : "The server cannot be reached."
      shown.replaceChildren(note(words, "bad"), error.status === 404 ? neighbours(view, Number(number)) : "")
    }
  }

  await update(name, argument)
  return update
}

const LOOKED_AT = 400

// The newest block whose start is among the last entries.
async function newestBlock(signal) {
  const stream = await json("/v1/stream", { signal })
  if (stream.stream_type !== 1) return null
  const from = Math.max(0, stream.total_entries - LOOKED_AT)
  const start = stream.version < 2 ? 1 : 2
  const rows = await json(`/v1/entries?from=${from}&limit=${LOOKED_AT}&type=${start}&format=json`, { signal })
  for (const row of rows.reverse()) {
    const entry = await json(`/v1/entries/${row.number}?decode=zkevm`, { signal })
    const number = entry.fields?.number ?? entry.fields?.l2_block_number
    if (number !== undefined) return number
  }
  return null
}

function neighbours(kind, number) {
  const title = kind === "batch" ? "batch" : "block"
  return el("p.links", {},
    number > 0 ? el("a", { href: `#${title}/${number - 1}` }, `Previous ${title}`) : el("span.dim", {}, `Previous ${title}`),
    el("a", { href: `#${title}/${number + 1}` }, `Next ${title}`))
}

function entryLink(event) {
  return event ? el("a", { href: `#entry/${event.entry}` }, `entry ${integer(event.entry)}`) : "–"
}

function block(found) {
  const values = found.block.fields
  const inBatch = values.batch_number
  const title = el("div.title", {}, el("h1.num", {}, `Block ${integer(found.number)}`),
    neighbours("block", found.number),
    inBatch === undefined ? "" : el("a", { href: `#batch/${inBatch}` }, `Batch ${integer(Number(inBatch))}`),
    el("span.rest", {}, entryLink(found.block)))
  return [title, el("div.panel", {}, el("h2", {}, found.block.kind), fields(values)),
    el("h2.gap", {}, "Transactions"), transactions(found.transactions)]
}

function batch(found) {
  const parts = [el("div.title", {}, el("h1.num", {}, `Batch ${integer(found.number)}`), neighbours("batch", found.number))]
  const about = { blocks: found.blocks.length, ...found.start?.fields, ...found.end?.fields }
  parts.push(el("div.panel", {}, el("h2", {}, "Batch"), fields(about)), el("h2.gap", {}, "Blocks"))
  const rows = found.blocks.slice(0, 1000).map((each) => {
    const values = each.block.fields
    const number = values.number ?? values.l2_block_number
    return el("tr", {},
      el("td.n", {}, el("a", { href: `#block/${number}` }, integer(Number(number)))),
      el("td.n", {}, integer(each.transactions.length)),
      el("td.n.optional", {}, String(values.timestamp ?? "–")),
      el("td.mono", {}, String(values.hash ?? values.block_hash ?? "–")))
  })
  const heads = [["Block", "c-number.n"], ["Transactions", "c-type.n"], ["Timestamp", "c-type.n.optional"], ["Hash", "hash"]]
  parts.push(el("div.table", {}, el("table", { "aria-label": "Blocks" },
    el("thead", {}, el("tr", {}, ...heads.map(([text, kind]) => el(`th.${kind}`, { scope: "col" }, text)))),
    el("tbody", {}, ...rows))))
  return parts
}

function transactions(all) {
  if (all.length === 0) return el("p.empty", {}, "The block has no transactions.")
  const heads = [["Hash", "c-hash"], ["From", "c-hash"], ["To", "c-hash"], ["Ether", "n"], ["Gas", "c-length.n.optional"], ["Input", "optional"]]
  const rows = all.map((each) => {
    const open = each.opened
    const cells = open
      ? [open.hash, open.sender ?? "–", open.to ?? "creates a contract", ether(open.value), integer(open.gas), open.input]
      : [`entry ${each.entry}: ${each.error ?? "not decoded"}`, "–", "–", "–", "–", "–"]
    return el("tr", {}, ...cells.map((text, at) => {
      const kind = ["td.mono", "td.mono", "td.mono", "td.n", "td.n.optional", "td.mono.optional"][at]
      const shown = text.length > 300 ? `${text.slice(0, 300)}…` : text
      return el(kind, { title: shown }, at === 0 ? el("a", { href: `#entry/${each.entry}` }, shown) : shown)
    }))
  })
  return el("div.table", {}, el("table", { "aria-label": "Transactions" },
    el("thead", {}, el("tr", {}, ...heads.map(([text, kind]) => el(`th.${kind}`, { scope: "col" }, text)))),
    el("tbody", {}, ...rows)))
}
