// What the page says of each node, from a snapshot.

// `rates`: bytes a second by pair of nodes; `tokenRates`: tokens a second by node.
export function describe(snapshot, rates, tokenRates) {
  const moved = new Map();
  for (const [pair, rate] of rates) {
    for (const incarnation of pair.split(" ")) moved.set(incarnation, (moved.get(incarnation) ?? 0) + rate);
  }
  return snapshot.nodes.map((node) => {
    const load = node.load;
    const total = load?.num_blocks_total ?? 0;
    return {
      ...node,
      name: node.node_id ?? node.address,
      shown: stateOf(node),
      reason: node.problem,
      usage: total ? 1 - load.num_blocks_free / total : 0,
      tokensPerS: tokenRates.get(node.incarnation) ?? 0,
      bytesPerS: moved.get(node.incarnation) ?? 0,
    };
  });
}

function stateOf(node) {
  return node.state === "connecting" && node.problem !== "not reached yet" ? "down" : node.state;
}

export const MARKS = {
  up: "●", draining: "◐", stopping: "◐", connecting: "○", down: "✕", incompatible: "▲", avoided: "△",
};
