// The page: which view is shown, the state of the connection, and the token.

import { blocks } from "./blocks.js"
import { clients } from "./clients.js"
import { onConnection, note, put, Refused, request, every, token } from "./core.js"
import { entries } from "./entries.js"
import { overview } from "./overview.js"
import { search } from "./search.js"

const main = document.getElementById("main")
const VIEWS = { overview, entries, entry: entries, blocks, block: blocks, batch: blocks, tx: blocks, hash: blocks,
  address: blocks, clients }
const TABS = { entry: "entries", block: "blocks", batch: "blocks", tx: "blocks", hash: "blocks", address: "blocks" }
const TITLES = { entry: "entry", block: "block", batch: "batch", tx: "transaction", hash: "hash", address: "address" }

let shown = ""
let leave = new AbortController()
let update = null

// The hash is the address: #view/argument?parameters. A view that is shown already only gets these.
async function route() {
  const [path, parameters] = (location.hash.slice(1) || "overview").split("?")
  const [name, ...rest] = path.split("/")
  const query = new URLSearchParams(parameters)
  const known = name in VIEWS ? name : "overview"
  const argument = rest.map(decodeURIComponent)
  const tab = TABS[known] ?? known
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${tab}`) link.setAttribute("aria-current", "page")
    else link.removeAttribute("aria-current")
  }
  document.title = `${TITLES[known] ?? tab} – datastreamer`
  if (shown === tab && update) {
    update(known, argument, query)
    return
  }
  leave.abort()
  leave = new AbortController()
  const { signal } = leave
  shown = tab
  update = null
  main.replaceChildren()
  try {
    const made = await VIEWS[known](main, signal, known, argument, query)
    if (!signal.aborted) update = made ?? null
    if (known !== name) main.prepend(note(`There is no page #${path}; this is the overview.`, "warn"))
  } catch (error) {
    if (signal.aborted) return
    shown = ""
    if (!(error instanceof Refused && error.status === 401)) main.replaceChildren(note(error.message, "bad"))
    setTimeout(() => signal.aborted || route(), 1000)
  }
}

// The dot in the header.

const dot = document.querySelector(".dot")
const text = document.getElementById("state-text")

function state(kind, words) {
  dot.className = `dot ${kind}`
  put(text, words)
  text.title = words
}

onConnection((connection) => {
  if (connection === "down") state("bad", "server not reachable")
  else if (connection === "unknown") state("warn", "token needed")
  else check()
})

async function check() {
  const answer = await request("/readyz")
  const why = (await answer.text()).trim()
  if (answer.ok) state("good", "serving")
  else state("warn", `not ready`), (text.title = why)
}

every(5000, new AbortController().signal, check)

// The token.

const dialog = document.getElementById("token-dialog")

token.wanted = (wrong) => {
  if (dialog.open) return
  document.getElementById("token-wrong").hidden = !wrong
  document.getElementById("token").value = ""
  dialog.showModal()
}

document.getElementById("token-form").addEventListener("submit", () => {
  token.set(document.getElementById("token").value)
  shown = ""
  route()
})

// The keyboard, as the sheet says.

const sheet = document.getElementById("keys")
let prefix = ""
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return
  const target = { o: "overview", e: "entries", b: "blocks", c: "clients" }[event.key]
  const turned = { j: "Next", k: "Previous" }[event.key]
  if (prefix === "g" && target) location.hash = target
  else if (turned) Array.from(main.querySelectorAll("a")).find((each) => each.textContent.startsWith(turned))?.click()
  else if (event.key === "?") sheet.showModal()
  else if (event.key === "/") {
    document.getElementById("search-text").focus()
    event.preventDefault()
  }
  prefix = event.key
})

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault()
  main.focus()
})

search(document.getElementById("search"))
addEventListener("hashchange", route)
route()
