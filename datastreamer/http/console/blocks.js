// Blocks of a zkEVM stream as a list that follows the head; a block, a batch, a transaction; what a
// hash or an address leads to.

import { call } from "./calls.js"
import {
  age, copyable, el, every, formats, integer, json, note, paused, put, Refused, table, utc,
} from "./core.js"
import { fields } from "./entries.js"

const WEI = 10n ** 18n
const GWEI = 10n ** 9n
const MOST_ROWS = 1000
const ROUGH = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 })

// An amount in a unit, exactly.
function amount(wei, unit = WEI) {
  const value = BigInt(wei)
  const digits = String(unit).length - 1
  const rest = (value % unit).toString().padStart(digits, "0").replace(/0+$/, "")
  return `${(value / unit).toLocaleString("en")}${rest && "."}${rest}`
}

const link = (view, key, text) => el("a", { href: `#${view}/${key}` }, text)
const short = (hex) => (hex && hex.length > 24 ? `${hex.slice(0, 12)}…${hex.slice(-8)}` : (hex ?? "–"))
const now = () => Date.now() / 1000
const when = (seconds) => [utc(seconds), seconds > now() ? ", in the future" : `, ${age(now() - seconds)} ago`]

export async function blocks(main, signal, name, argument, query) {
  const shown = el("div", { "aria-live": "polite" })
  main.replaceChildren(shown)
  let turn = new AbortController()

  async function update(view, [key = ""], parameters) {
    turn.abort()
    turn = new AbortController()
    signal.addEventListener("abort", () => turn.abort(), { once: true })
    const mine = turn.signal
    try {
      const parts = await SHOWN[view](key, parameters, mine)
      if (!mine.aborted) shown.replaceChildren(...parts)
    } catch (error) {
      if (mine.aborted) return
      const words = error instanceof Refused ? error.message : "The server cannot be reached."
      const around = view === "block" || view === "batch" ? neighbours(view, Number(key)) : ""
      shown.replaceChildren(note(words, "bad"), error.status === 404 ? around : "")
    }
  }

  await update(name, argument, query)
  return update
}

const number = (key) => {
  if (!/^\d+$/.test(key)) throw new Refused(0, "the address names no number")
  return key
}

const SHOWN = {
  blocks: (key, parameters, signal) => recent(parameters.get("before"), signal),
  block: async (key, parameters, signal) => block(await json(`/v1/blocks/${number(key)}`, { signal })),
  batch: async (key, parameters, signal) => batch(await json(`/v1/batches/${number(key)}`, { signal })),
  tx: async (key, parameters, signal) => transaction(await json(`/v1/transactions/${number(key)}`, { signal })),
  hash: (key, parameters, signal) => searched(key, `/v1/search/${key}`, signal, async ({ found: [first] }, shown) => {
    if (first && !shown.firstChild) {
      shown.replaceChildren(...(first.kind === "block"
        ? block(await json(`/v1/blocks/${first.number}`, { signal }))
        : transaction(await json(`/v1/transactions/${first.entry}`, { signal }))))
    }
    return Boolean(first)
  }),
  async address(key, parameters, signal) {
    const before = parameters.get("before")
    const older = el("a", { hidden: true }, "Older transactions")
    const path = `/v1/search/${key}${before === null ? "" : `?before=${number(before)}`}`
    const parts = await searched(key, path, signal, ({ found, before: next }, shown) => {
      older.hidden = next === null
      older.href = `#address/${key}?before=${next}`
      if (found.length !== shown.querySelectorAll("tbody tr").length) {
        shown.replaceChildren(transactions(found.map((each) => ({ entry: each.entry, opened: each.error ? null : each, error: each.error })), ""))
      }
      return found.length > 0
    })
    return [el("div.title", {}, el("h1", {}, "Address"), copyable(key),
      el("span.links.rest", {}, before === null ? "" : el("a", { href: `#address/${key}` }, "Newest transactions"), older, formats({ JSON: path }))), ...parts]
  },
}

// Search: how far the index is, until everything was searched.

async function searched(key, path, signal, show) {
  const state = el("p.note", { role: "status" })
  const shown = el("div")
  every(1000, signal, async () => {
    if (state.hidden) return
    const found = await json(path, { signal })
    const all = found.complete
    const done = await show(found, shown)
    state.hidden = done && all
    state.classList.toggle("bad", Boolean(found.trouble))
    const range = found.searched_entries ? `Entries 0 to ${integer(found.searched_entries - 1)} were searched` : "No entry was searched yet"
    const rest = `of ${integer(found.total_entries)} (${Math.floor((100 * found.searched_entries) / (found.total_entries || 1))} %)`
    put(state, found.trouble ? `${range}, ${rest}. ${found.trouble}` : (all
      ? `No block or transaction of this stream has ${key}. All ${integer(found.total_entries)} entries were searched.`
      : `${range}, ${rest}; the index of hashes is being made, and the rest may have it.`))
  })
  return [state, shown]
}

// The list.

const COLUMNS = [["Block", "c-number.n"], ["Time", "c-time.optional"], ["Age", "c-age.n"], ["Batch", "c-number.n.optional.rare"],
  ["Txs", "c-txs.n"], ["Gas limit", "c-count.n.optional"], ["Fees at most, ether", "c-fees.n"], ["Hash", "rare.optional"]]

async function recent(before, signal) {
  const body = el("tbody")
  const foot = el("p.foot", { role: "status" })
  const empty = el("p.empty", { hidden: true })
  const older = el("a", { hidden: true }, "Older blocks")
  const drawn = table("Blocks", COLUMNS, body, empty)
  const path = `/v1/blocks${before === null ? "" : `?before=${number(before)}`}`
  let seen = ""
  let lines = []

  function draw() {
    body.replaceChildren(...lines.map((each) => {
      if (each.error) {
        const which = each.number === null ? "" : `Block ${integer(each.number)}: `
        // As many columns as a narrow page shows, and the others.
        return el("tr", {}, el("td.bad", { colSpan: 4 }, which, each.error),
          ...COLUMNS.filter(([, kind]) => kind.includes("optional")).map(([, kind]) => el(`td.${kind}`)))
      }
      const cells = [link("block", each.number, integer(each.number)), utc(each.timestamp), "", link("batch", each.batch, integer(each.batch)),
        integer(each.transactions), integer(each.gas), each.fees === null ? "–" : ROUGH.format(Number(each.fees) / 1e18), short(each.hash)]
      return el("tr", { title: each.hash ? `${each.hash}, fees of at most ${amount(each.fees ?? 0)} ether` : "" }, ...cells.map((cell, at) => el(`td.${COLUMNS[at][1]}`, {}, cell)))
    }))
    ages()
  }

  const ages = () => lines.forEach((each, at) => {
    if (!each.error) put(body.rows[at].cells[2], age(Math.max(0, now() - each.timestamp)))
  })

  async function look() {
    const { total_entries, epoch } = await json("/v1/stream", { signal })
    const state = `${total_entries} ${epoch}`
    const waits = seen && state !== seen && paused(drawn)
    if (state !== seen && !waits && (before === null || !seen)) {
      const found = await json(path, { signal })
      seen = state
      lines = found.blocks
      draw()
      older.hidden = found.before === null
      older.href = `#blocks?before=${found.before}`
      empty.hidden = lines.length > 0
      put(empty, "The stream has no blocks here.")
    }
    ages()
    put(foot, before !== null ? "" : waits ? "Newer blocks wait while you read: move the pointer off the list and scroll up." : "Newest first, following the head")
  }

  await look()
  every(1000, signal, look)
  return [el("div.title", {}, el("h1", {}, "Blocks"),
    el("p.links.rest", {}, before === null ? "" : el("a", { href: "#blocks" }, "Newest blocks"), older, formats({ JSON: path }))), drawn, foot]
}

function neighbours(kind, number) {
  return el("p.links", {},
    number > 0 ? link(kind, number - 1, `Previous ${kind}`) : el("span.dim", {}, `Previous ${kind}`),
    link(kind, number + 1, `Next ${kind}`))
}

const entryLink = (at) => link("entry", at, `Entry ${integer(at)}`)

// The forms of a range of entries.
const range = (from, to) => {
  const path = (format) => `/v1/entries?from=${from}&to=${to}&format=${format}`
  return { NDJSON: path("ndjson"), Arrow: path("arrow") }
}

function block(found) {
  const values = found.block.fields
  const last = found.end?.entry ?? found.transactions.at(-1)?.entry ?? found.block.entry
  const hash = values.hash ?? found.end?.fields.hash
  const title = el("div.title", {}, el("h1.num", {}, `Block ${integer(found.number)}`), neighbours("block", found.number),
    values.batch_number === undefined ? "" : link("batch", values.batch_number, `Batch ${integer(Number(values.batch_number))}`),
    el("span.links.rest", {}, entryLink(found.block.entry),
      formats({ JSON: `/v1/blocks/${found.number}`, ...range(found.bookmark ?? found.block.entry, last) })))
  const about = { time: when(Number(values.timestamp)), ...(hash && { hash: copyable(hash) }) }
  return [title, el("div.panel", {}, facts(about), el("h2.gap", {}, found.block.kind), fields(values)),
    el("h2.gap", {}, "Transactions"), transactions(found.transactions, "The block has no transactions.")]
}

function batch(found) {
  const about = { blocks: found.blocks.length, ...found.start?.fields, ...found.end?.fields }
  const last = found.end?.entry ?? found.blocks.at(-1)?.end?.entry ?? found.blocks.at(-1)?.block.entry ?? found.bookmark
  const rows = found.blocks.slice(0, MOST_ROWS).map((each) => {
    const values = each.block.fields
    return el("tr", {},
      el("td.n", {}, link("block", values.number, integer(Number(values.number)))),
      el("td.n", {}, integer(each.transactions.length)),
      el("td.optional", {}, utc(Number(values.timestamp))),
      el("td.mono", {}, String(values.hash ?? each.end?.fields.hash ?? "–")))
  })
  const heads = [["Block", "c-number.n"], ["Transactions", "c-type.n"], ["Time", "c-time.optional"], ["Hash", "hash"]]
  return [el("div.title", {}, el("h1.num", {}, `Batch ${integer(found.number)}`), neighbours("batch", found.number),
    el("span.links.rest", {}, formats({ JSON: `/v1/batches/${found.number}`, ...range(found.bookmark, last) }))),
    el("div.panel", {}, el("h2", {}, "Batch"), fields(about)), el("h2.gap", {}, "Blocks"),
    table("Blocks", heads, el("tbody", {}, ...rows))]
}

const HEADS = [["Hash", "c-hash"], ["From", "c-hash"], ["To", "c-hash"], ["Ether", "n"], ["Gas limit", "c-length.n.optional"]]

export function transactions(all, none) {
  if (all.length === 0) return el("p.empty", {}, none)
  // The lines about an address have no input.
  const last = all[0].opened && all[0].opened.input === undefined ? "Nonce" : "Input"
  const rows = all.map((each) => {
    const open = each.opened
    const cells = open
      ? [open.hash, open.sender ?? "–", open.to ?? "creates a contract", amount(open.value), integer(open.gas), open.input ?? integer(open.nonce)]
      : [`entry ${each.entry}: ${each.error ?? "not decoded"}`, "–", "–", "–", "–", "–"]
    return el("tr", {}, ...cells.map((text, at) => {
      const kind = ["td.mono", "td.mono", "td.mono", "td.n", "td.n.optional", "td.mono.optional"][at]
      const shown = text.length > 300 ? `${text.slice(0, 300)}…` : text
      const view = at === 0 ? link("tx", each.entry, shown) : text.length === 42 && at < 3 ? link("address", text, shown) : shown
      return el(kind, { title: shown }, view)
    }))
  })
  return table("Transactions", [...HEADS, [last, "optional"]], el("tbody", {}, ...rows))
}

// Names and values, which may be elements.
function facts(values) {
  return el("dl", {}, ...Object.entries(values).flatMap(([name, value]) =>
    [el("dt", {}, name), el("dd", {}, ...(Array.isArray(value) ? value : [value]))]))
}

export function transaction(found) {
  const open = found.opened
  const title = el("div.title", {}, el("h1", {}, "Transaction"),
    el("span.links.rest", {}, entryLink(found.entry),
      formats({ JSON: `/v1/transactions/${found.entry}`, ...range(found.entry, found.entry) })))
  const about = found.block
    ? { block: link("block", found.block.number, integer(found.block.number)), time: when(found.block.timestamp) } : {}
  if (!open) return [title, note(found.error ?? "The server lacks the packages that decode transactions.", "bad"),
    el("div.panel", {}, facts(about), fields(found.fields))]
  const price = open.gas_price ?? open.max_fee_per_gas ?? 0
  const percentage = Number(found.fields.effective_gas_price_percentage)
  const paid = (BigInt(price) * BigInt(percentage + 1)) / 256n
  const called = call(open.input)
  const input = !called ? el("p.dim", {}, open.to ? "The transaction has no input." : "The input is the contract's code.")
    : called.signature ? el("div", {}, el("p.mono", {}, called.signature), fields(called.values))
    : el("p", {}, open.to ? `The selector ${called.selector} is not a well-known one.` : "The input is the code of the contract.")
  return [title, el("div.panel", {}, facts({
    hash: copyable(open.hash), ...about,
    from: open.sender ? copyable(open.sender, "address") : "no key can have signed it",
    to: open.to ? copyable(open.to, "address") : "creates a contract",
    value: `${amount(open.value)} ether`,
    "fee at most": `${amount(BigInt(open.gas) * paid)} ether for ${integer(open.gas)} gas`,
    "gas price": `${amount(paid, GWEI)} gwei${percentage === 255 ? "" : `, which is ${percentage + 1}/256 of ${amount(price, GWEI)}`}`,
    nonce: integer(open.nonce), type: open.type, "chain id": open.chain_id ?? "none",
    valid: found.fields.is_valid === false ? el("span.bad", {}, "no") : "yes",
  })), el("h2.gap", {}, "Input"), el("div.panel", {}, input, el("pre.wrap", { tabindex: "0" }, open.input)),
    el("h2.gap", {}, "Raw"), el("div.panel", {}, fields(found.fields))]
}
