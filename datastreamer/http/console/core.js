// What all views use: requests, following, elements, and how values are shown. Text from the
// stream becomes text nodes only, never markup.

export class Refused extends Error {
  constructor(status, detail) {
    super(detail)
    this.status = status
  }
}

// Connection: "up", "down", or the token that is missing.

const listeners = new Set()
let connection = "unknown"

export function onConnection(listener) {
  listeners.add(listener)
}

function connected(state) {
  if (state === connection) return
  connection = state
  for (const listener of listeners) listener(state)
}

export const token = {
  get: () => sessionStorage.getItem("token"),
  set: (value) => sessionStorage.setItem("token", value),
  wanted: () => {},
}

export async function request(path, { signal, headers = {} } = {}) {
  const shown = token.get()
  if (shown) headers.Authorization = `Bearer ${shown}`
  let answer
  try {
    answer = await fetch(path, { signal, headers })
  } catch (error) {
    if (error.name !== "AbortError") connected("down")
    throw error
  }
  if (answer.status === 401) {
    connected("unknown")
    token.wanted(Boolean(shown))
    throw new Refused(401, "a token is needed")
  }
  connected("up")
  if (!answer.ok && answer.status !== 503) throw await refusal(answer)
  return answer
}

async function refusal(answer) {
  const problem = await answer.json().catch(() => ({}))
  return new Refused(answer.status, problem.detail ?? `${answer.status} ${answer.statusText}`)
}

// Numbers that JavaScript cannot hold become strings; strings are matched first.
const TOKENS = /"(?:[^"\\]|\\.)*"|-?\d{16,}/g

export function parsed(text) {
  return JSON.parse(text.replace(TOKENS, (found) => (found[0] === '"' ? found : `"${found}"`)))
}

export async function json(path, options) {
  const answer = await request(path, options)
  if (!answer.ok) throw await refusal(answer)
  return parsed(await answer.text())
}

// The lines of an answer, as they arrive.
export async function* lines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""
  for (;;) {
    const { done, value } = await reader.read()
    if (done) break
    const parts = (rest + value).split("\n")
    rest = parts.pop()
    yield* parts
  }
  if (rest) yield rest
}

const RETRY_MS = 1000

// Calls `on.entries(rows)`, `on.updated(rows)` and `on.truncated(total)` until `signal` aborts;
// reconnects after the last event that arrived whole, and throws if there is no place to continue.
export async function follow(from, on, signal) {
  let id = null
  while (!signal.aborted) {
    try {
      const headers = id === null ? {} : { "Last-Event-ID": id }
      const answer = await request(`/v1/follow?from=${from}`, { signal, headers })
      if (!answer.ok) throw await refusal(answer)
      on.begun?.()
      let event = {}
      for await (const line of lines(answer)) {
        if (line) {
          const at = line.indexOf(": ")
          if (at > 0) event[line.slice(0, at)] = line.slice(at + 2)
          continue
        }
        if (event.id !== undefined) id = event.id
        if (event.event === "truncated") on.truncated(parsed(event.data).total_entries)
        else if (event.event === "updated") on.updated(parsed(event.data))
        else if (event.data) on.entries(parsed(event.data))
        event = {}
      }
    } catch (error) {
      if (signal.aborted) return
      if (cannotContinue(error)) throw error
      on.failed?.(error)
    }
    await pause(RETRY_MS, signal)
  }
}

// The stream was changed in a way that is not known any more, or is another one.
export const cannotContinue = (error) =>
  error instanceof Refused && (error.status === 410 || error.status === 416)

export function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms)
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true })
  })
}

// Calls `poll` at once and every `ms` while the page is visible, until `signal` aborts.
export async function every(ms, signal, poll) {
  while (!signal.aborted) {
    if (document.visibilityState === "visible") {
      try {
        await poll()
      } catch (error) {
        if (signal.aborted) return
      }
    }
    await pause(ms, signal)
  }
}

// Elements.

export function el(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".")
  const made = document.createElement(tag || "div")
  if (classes.length) made.className = classes.join(" ")
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value)
    else if (key in made && typeof value !== "string") made[key] = value
    else made.setAttribute(key, value)
  }
  made.append(...children.filter((child) => child !== null && child !== undefined))
  return made
}

// Changes text only if it differs, so that nothing is drawn again without need.
export function put(element, text) {
  const shown = String(text)
  if (element.textContent !== shown) element.textContent = shown
}

export function note(text, kind = "") {
  return el(`p.note${kind && "." + kind}`, { role: kind ? "alert" : "status" }, text)
}

export function table(label, heads, body, ...more) {
  const cells = heads.map(([text, kind]) => el(`th.${kind}`, { scope: "col" }, text))
  return el("div.table", {}, el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, ...cells)), body), ...more)
}

// A value with a button that copies it, and a link if `view` shows more of it.
export function copyable(value, view = "") {
  const button = el("button.copy", { type: "button", "aria-label": `Copy ${value}`, onclick: copy }, "Copy")
  async function copy() {
    try {
      await navigator.clipboard.writeText(value)
      put(button, "Copied")
    } catch {
      // Without TLS the clipboard is closed to pages: the value is selected, for Ctrl-C.
      getSelection().selectAllChildren(button.previousSibling)
      put(button, "Press Ctrl-C")
    }
    setTimeout(() => put(button, "Copy"), 2000)
  }
  return el("span.copyable", {}, view ? el("a.mono", { href: `#${view}/${value}` }, value) : el("span.mono", {}, value), button)
}

// Links to the same in other forms. With a token they are fetched here, and saved.
export function formats(paths) {
  return el("span.links", {}, ...Object.entries(paths).map(([name, path]) => el("a", { href: path, async onclick(event) {
    if (!token.get()) return
    event.preventDefault()
    await save(path, `${path.split("/").pop().replace(/\W+/g, "-")}.${name.toLowerCase()}`)
  } }, name)))
}

export async function save(path, name) {
  const url = URL.createObjectURL(await (await request(path)).blob())
  el("a", { href: url, download: name }).click()
  setTimeout(() => URL.revokeObjectURL(url), 1000)
}

// Whether somebody reads in a list, which must not move then.
export const paused = (list) => scrollY > 0 || list.matches(":hover")

// Values.

const INTEGER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 })
const SHORT = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 })

export const integer = (value) => (value == null ? "–" : INTEGER.format(value))

export function rate(value, unit) {
  if (value == null) return "–"
  return unit === "bytes" ? `${size(value)}/s` : value < 100 ? SHORT.format(value) : integer(value)
}

export function size(value) {
  if (value == null) return "–"
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024 || unit === "TiB") {
      return `${unit === "B" ? integer(value) : SHORT.format(value)} ${unit}`
    }
    value /= 1024
  }
}

export function age(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`
  if (seconds >= 100 * 86400) return `${integer(Math.floor(seconds / 86400))} d`
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`
}

// A time in seconds since 1970 as UTC. A stream may hold any number as a time.
export function utc(seconds) {
  const date = new Date(seconds * 1000)
  return isNaN(date) ? `${seconds} s` : `${date.toISOString().slice(0, 19).replace("T", " ")} UTC`
}

export const BOOKMARK = 176

const KINDS = {
  1: { 176: "bookmark", 1: "StartL2Block", 2: "L2Tx", 3: "EndL2Block", 4: "UpdateGER" },
  2: { 176: "bookmark", 1: "BatchStart", 2: "L2Block", 3: "Transaction", 4: "BatchEnd",
       5: "UpdateGER", 6: "L2BlockEnd" },
}

const kinds = (stream) => (stream.stream_type === 1 ? KINDS[stream.version < 2 ? 1 : 2] : { 176: "bookmark" })

export const typeNames = (stream) => Object.values(kinds(stream))

// The type that a person writes as its number or name; null if there is none.
export function typeOf(word, stream) {
  if (/^\d+$/.test(word)) return Number(word)
  const found = Object.entries(kinds(stream)).find(([, name]) => name.toLowerCase() === word.toLowerCase())
  return found ? Number(found[0]) : null
}

// The name of a type, which a stream of another application does not have in this sense.
export function typeName(type, stream) {
  if (type === BOOKMARK) return "bookmark"
  if (stream?.stream_type !== 1) return String(type)
  const name = KINDS[stream.version < 2 ? 1 : 2][type]
  return name ? `${type} ${name}` : String(type)
}

export function bytesOf(hex) {
  const bytes = new Uint8Array((hex.length - 2) / 2)
  for (let at = 0; at < bytes.length; at++) bytes[at] = parseInt(hex.substr(2 + 2 * at, 2), 16)
  return bytes
}

const printable = (byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")

export function dump(bytes) {
  const rows = []
  for (let at = 0; at < bytes.length; at += 16) {
    const part = Array.from(bytes.subarray(at, at + 16))
    const hex = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")
    rows.push(`${at.toString(16).padStart(5, "0")}  ${hex.padEnd(47)}  ${part.map(printable).join("")}`)
  }
  return rows.join("\n")
}

// A bookmark's key as its block or batch, as text, or in hex.
export function keyName(hex, stream) {
  const bytes = bytesOf(hex)
  if (stream?.stream_type === 1 && stream.version < 2 && bytes.length === 9 && bytes[0] < 2) {
    return `${bytes[0] ? "batch" : "block"}:${BigInt(`0x${hex.slice(4)}`)}`
  }
  if (stream?.stream_type === 1 && stream.version >= 2 && bytes[0] === 8 && bytes.length >= 2) {
    let number = 0n
    for (let at = bytes.length - 1; at >= 3; at--) number = (number << 7n) | BigInt(bytes[at] & 127)
    if (bytes[1] === 1 || bytes[1] === 2) return `${bytes[1] === 1 ? "batch" : "block"}:${number}`
  }
  return bytes.every((byte) => byte >= 32 && byte < 127) ? String.fromCharCode(...bytes) : hex
}
