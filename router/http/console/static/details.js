// One request in full: stages, why it was placed where it was, and what its nodes did.

import { getJson } from "./api.js";
import { byId, h, setText } from "./dom.js";
import { bytes, count, plural, seconds } from "./format.js";
import { nodesOf } from "./requests.js";
import { drawBar, stageBar, stageTable } from "./stages.js";

export async function openDetails(id) {
  const dialog = byId("details");
  setText(byId("details-title"), `Request ${id}`);
  byId("details-body").replaceChildren(h("p", { class: "muted" }, "loading"));
  if (!dialog.open) dialog.showModal();
  try {
    const { requests } = await getJson(`debug/requests/${encodeURIComponent(id)}`);
    byId("details-body").replaceChildren(...requests.map(described));
  } catch (error) {
    byId("details-body").replaceChildren(h("p", { class: "notice" }, error.message));
  }
}

function described(request) {
  const bar = stageBar();
  drawBar(bar, request.stages_s, request.first_token_s || 1);
  const facts = [
    ["model", request.model],
    ["received", new Date(request.received_at).toLocaleString()],
    ["tokens", `${count(request.num_prompt_tokens)} of the prompt, ${count(request.num_output_tokens)} of the answer`],
    ["first token", seconds(request.first_token_s)],
    ["total", seconds(request.total_s) + (request.is_live ? ", still running" : "")],
    ["trace", request.trace_id],
    ["error", request.error],
  ];
  const first = request.first_token_s
    ? [h("h3", {}, "Time to first token"), bar, stageTable(request.stages_s, request.first_token_s), h("p", {}, verdict(request))]
    : [h("p", {}, "It has no token yet.")];
  return h("article", {}, list(facts), ...first, ...request.attempts.map((attempt) => attemptOf(attempt, request)));
}

function verdict({ decode_alone: alone, first_token_s: took }) {
  if (!alone) return "It was not handed over before its first token, so there is nothing to compare it with.";
  const expected = seconds(alone.expected_first_token_s);
  return alone.would_be_faster
    ? `The decode node alone would have been faster: ${expected} to the first token instead of ${seconds(took)}.`
    : `The pair was faster: the decode node alone would have taken ${expected} instead of ${seconds(took)}.`;
}

function attemptOf(attempt, request) {
  const { estimate, prompt, decode, adopted } = attempt;
  const alone = estimate.kind === "pair" ? `; the decode node alone would take ${seconds(estimate.alone_s)}` : "";
  const facts = [
    ["nodes", nodesOf(attempt)],
    ["placed by", `policy ${estimate.policy}: ${estimate.kind === "pair" ? "a pair" : "the decode node alone"}`],
    ["expected", `queue ${seconds(estimate.queue_s)}, prefill ${seconds(estimate.prefill_s)}, handoff `
      + `${seconds(estimate.handoff_s)}${alone}`],
    ["cached", `${count(estimate.num_cached_tokens)} tokens expected, ${count(attempt.num_cached_tokens)} found`],
    ["prompt", prompt && `${plural(prompt.num_chunks, "chunk")}, ${plural(prompt.num_parts, "KV part")}, `
      + `${plural(prompt.num_held_blocks, "block")} not sent since the decode node had them`],
    ["KV", adopted && `${bytes(adopted.transfer_bytes)}; ${seconds(adopted.transfer_s)} not hidden behind the prompt`],
    ["decoding", decode && `${plural(decode.num_steps, "step")}; longest gaps ${decode.longest.map((gap) => seconds(gap.gap_s)).join(", ") || "–"}`],
    ["moved to", attempt.moves.map((move) => `${move.node} at ${seconds(move.at_s)}`).join(", ")],
    ["error", attempt.error],
  ];
  const events = Object.entries({ placed: attempt.placed_at_s, started: attempt.started_at_s, "first token": attempt.attempt === 0
    ? request.first_token_s : null, "handed off": attempt.handed_off_at_s, adopted: attempt.adopted_at_s, ended: attempt.ended_at_s });
  const known = events.filter(([, at]) => at !== null && at !== undefined).sort((a, b) => a[1] - b[1]);
  return h("section", {}, h("h3", {}, `Attempt ${attempt.attempt + 1}`), list(facts),
    h("ol", { class: "events" }, ...known.map(([name, at]) => h("li", {}, h("span", { class: "number" }, seconds(at)), ` ${name}`))));
}

function list(facts) {
  const known = facts.filter(([, value]) => value);
  return h("dl", { class: "facts" }, ...known.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
