// The page: which view is shown, the state of the connection, and the token.

import { blocks } from "./blocks.js"
import { clients } from "./clients.js"
import { json, onConnection, note, put, Refused, request, every, token } from "./core.js"
import { entries } from "./entries.js"
import { overview } from "./overview.js"

const main = document.getElementById("main")
const VIEWS = { overview, entries, entry: entries, blocks, block: blocks, batch: blocks, clients }
const TABS = { entry: "entries", block: "blocks", batch: "blocks" }

let shown = ""
let leave = new AbortController()
let update = null

// The hash is the address: #view/argument. A view that is shown already only gets the argument.
async function route() {
  const [name, ...rest] = (location.hash.slice(1) || "overview").split("/")
  const known = name in VIEWS ? name : "overview"
  const argument = rest.map(decodeURIComponent)
  const tab = TABS[known] ?? known
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${tab}`) link.setAttribute("aria-current", "page")
    else link.removeAttribute("aria-current")
  }
  document.title = `${tab} – datastreamer`
  if (shown === tab && update) {
    update(known, argument)
    return
  }
  leave.abort()
  leave = new AbortController()
  const { signal } = leave
  shown = tab
  update = null
  main.replaceChildren()
  try {
    const made = await VIEWS[known](main, signal, known, argument)
    if (!signal.aborted) update = made ?? null
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

// Keyboard: g and a letter leads to a view, / to the field to jump.

let prefix = ""
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return
  const target = { o: "overview", e: "entries", b: "blocks", c: "clients" }[event.key]
  if (prefix === "g" && target) location.hash = target
  if (event.key === "/") {
    document.querySelector("main input")?.focus()
    event.preventDefault()
  }
  prefix = event.key
})

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault()
  main.focus()
})

addEventListener("hashchange", route)
route()
