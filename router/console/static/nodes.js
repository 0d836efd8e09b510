// What the page says of each node, from a snapshot.

// `rates`: bytes a second by pair of nodes; `tokenRates`: tokens a second by node.
export function describe(snapshot, rates, tokenRates) {
  const misfits = new Map();
  for (const { prefill, decode, reason } of snapshot.unpaired) {
    append(misfits, prefill, `is never paired with ${decode}: ${reason}`);
    append(misfits, decode, `is never paired with ${prefill}: ${reason}`);
  }
  const moved = new Map();
  for (const [pair, rate] of rates) {
    for (const incarnation of pair.split(" ")) moved.set(incarnation, (moved.get(incarnation) ?? 0) + rate);
  }
  return snapshot.nodes.map((node) => {
    const [state, reason] = stateOf(node, misfits.get(node.node_id));
    const load = node.load;
    const total = load?.num_blocks_total ?? 0;
    return {
      ...node,
      name: node.node_id ?? node.address,
      shown: state,
      reason,
      usage: total ? 1 - load.num_blocks_free / total : 0,
      tokensPerS: tokenRates.get(node.incarnation) ?? 0,
      bytesPerS: moved.get(node.incarnation) ?? 0,
    };
  });
}

// One of up, draining, connecting, down, incompatible; and why it is not up.
function stateOf(node, misfits) {
  if (node.state === "connecting") return [node.problem === "not reached yet" ? "connecting" : "down", node.problem];
  if (node.problem) return ["draining", node.problem];
  if (misfits) return ["incompatible", misfits.join("; ")];
  return ["up", null];
}

function append(map, key, text) {
  map.set(key, [...(map.get(key) ?? []), text]);
}

export const MARKS = { up: "●", draining: "◐", connecting: "○", down: "✕", incompatible: "▲" };
