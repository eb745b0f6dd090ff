// The field at the top: an entry's number, block:N, batch:N, a bookmark, a hash, an address.

import { json, put, Refused } from "./core.js"

const FINDS = "This field finds an entry's number, block:N, batch:N, a bookmark, a hash and an address."

// The address of what a text names; asks the server where that is needed. Throws `Refused`.
async function address(text) {
  const block = /^(block|batch):(\d+)$/.exec(text)
  if (block) return `${block[1]}/${block[2]}`
  // Longer than every bookmark; some programs write hashes without 0x.
  const [, hex] = /^(?:0x)?([0-9a-f]{64}|[0-9a-f]{40})$/i.exec(text) ?? []
  if (hex) return `${hex.length === 64 ? "hash" : "address"}/0x${hex.toLowerCase()}`
  const digits = /^0x([0-9a-f]{33,})$/i.exec(text)?.[1].length
  if (digits) throw new Refused(400, `A hash has 64 hex digits after 0x and an address 40; this has ${digits}.`)
  if (/^\d+$/.test(text)) return `entry/${text}`
  return `entry/${(await json(`/v1/bookmarks/${encodeURIComponent(text)}`)).entry}`
}

export function search(form) {
  const field = form.querySelector("input")
  const wrong = document.getElementById("search-wrong")
  form.addEventListener("submit", async (event) => {
    event.preventDefault()
    const text = field.value.trim()
    if (!text) return
    wrong.hidden = true
    try {
      location.hash = await address(text)
      field.blur()
    } catch (error) {
      wrong.hidden = false
      const hint = error.status === 404 ? `. ${FINDS}` : ""
      put(wrong, error instanceof Refused ? error.message + hint : "The server cannot be reached.")
    }
  })
  addEventListener("hashchange", () => (wrong.hidden = true))
}
