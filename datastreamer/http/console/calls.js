// What the input of a transaction calls, where its selector is well known.

const KNOWN = {
  "a9059cbb": "transfer(address to, uint256 amount)",
  "23b872dd": "transferFrom(address from, address to, uint256 amount)",
  "095ea7b3": "approve(address spender, uint256 amount)",
  "39509351": "increaseAllowance(address spender, uint256 added)",
  "42842e0e": "safeTransferFrom(address from, address to, uint256 token)",
  "a22cb465": "setApprovalForAll(address operator, bool approved)",
  "40c10f19": "mint(address to, uint256 amount)",
  "42966c68": "burn(uint256 amount)",
  "d0e30db0": "deposit()",
  "2e1a7d4d": "withdraw(uint256 amount)",
  "cd586579": "bridgeAsset(uint32 network, address to, uint256 amount, address token, bool update, bytes permit)",
  "240ff378": "bridgeMessage(uint32 network, address to, bool update, bytes data)",
  "ac9650d8": "multicall(bytes[] calls)",
  "38ed1739": "swapExactTokensForTokens(uint256 amount, uint256 least, address[] path, address to, uint256 deadline)",
  "7ff36ab5": "swapExactETHForTokens(uint256 least, address[] path, address to, uint256 deadline)",
}

function value(type, word) {
  if (type === "address") return `0x${word.slice(24)}`
  if (type === "bool") return String(BigInt(`0x${word}`) !== 0n)
  if (type.startsWith("uint")) return BigInt(`0x${word}`).toLocaleString("en")
  return `from byte ${BigInt(`0x${word}`)} on`
}

// The signature and the arguments by name; null if there is no input, `signature` null if the
// selector is not known or the input is too short for it.
export function call(input) {
  if (input.length < 10) return null
  const selector = input.slice(2, 10)
  const signature = KNOWN[selector] ?? null
  const words = input.slice(10)
  const parameters = signature?.slice(signature.indexOf("(") + 1, -1).split(", ").filter(Boolean) ?? []
  if (!signature || words.length < 64 * parameters.length) return { selector: `0x${selector}`, signature: null }
  const values = parameters.map((each, at) => {
    const [type, name] = each.split(" ")
    return [name, value(type, words.slice(64 * at, 64 * at + 64))]
  })
  return { selector: `0x${selector}`, signature, values: Object.fromEntries(values) }
}
