// The last requests: a row each, with a bar of the stages of its time to first token.

import { byId, h, keyed, set, setText } from "./dom.js";
import { clock, count, seconds } from "./format.js";
import { drawBar, stageBar } from "./stages.js";

// Shows the rows; `open` gets the id of a request whose details are wanted.
export function showRequests(requests, open) {
  byId("no-requests").hidden = requests.length > 0;
  const longest = Math.max(0.001, ...requests.map((request) => request.first_token_s ?? 0));
  keyed(byId("request-rows"), requests, (request) => request.request_id, (request) => newRow(request, open), (row, request) => {
    drawRow(row, request, longest);
  });
}

function newRow(request, open) {
  const id = request.request_id;
  const button = h("button", { type: "button", class: "link-button", title: id }, shortened(id));
  const cells = ["", "", "nodes", "number", "number"].map((name) => h("td", { class: name || null }));
  // a click anywhere in the row; the keyboard reaches the button
  return h("tr", { class: "request", click: () => open(id) },
    h("th", { scope: "row" }, button), ...cells, h("td", {}, stageBar()));
}

function drawRow(row, request, longest) {
  const [, received, tokens, nodes, first, total, bar] = row.children;
  setText(received, clock(new Date(request.received_at)));
  setText(tokens, `${count(request.num_prompt_tokens)} → ${count(request.num_output_tokens)}`);
  setText(nodes, nodesOf(request));
  setText(first, seconds(request.first_token_s));
  setText(total, endOf(request));
  set(total, "title", request.error_code ?? (request.is_live ? "still running" : null));
  set(row, "class", request.error_code ? "request failed" : request.is_live ? "request live" : "request");
  drawBar(bar.firstChild, request.stages_s, longest);
}

export function nodesOf({ prefill_node: prefill, decode_node: decode }) {
  if (!prefill) return "waits for room";
  return prefill === decode ? prefill : `${prefill} → ${decode}`;
}

function endOf(request) {
  if (request.is_live) return `${seconds(request.total_s)} …`;
  return request.error_code ? `✕ ${request.error_code}` : seconds(request.total_s);
}

const shortened = (id) => (id.length > 20 ? `${id.slice(0, 9)}…${id.slice(-8)}` : id);
