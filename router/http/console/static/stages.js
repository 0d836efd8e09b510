// The stages of a time to first token: their order, their bars, and what they mean.

import { h, set, setText, keyed } from "./dom.js";
import { seconds } from "./format.js";

export const STAGES = {
  receive: "the router reads the request",
  tokenize: "the prompt becomes token ids",
  place: "nodes are chosen",
  wait_for_node: "no node could take it",
  retry: "an earlier attempt failed",
  queue: "it waits on the node",
  prefill: "the prompt is computed",
  reserve: "the decode node has no room yet",
  transfer: "KV moves to the decode node",
  step_wait: "it waits for the next step",
  decode: "the search goes on",
  network: "messages are on their way",
};

export function legend(list) {
  for (const [name, meaning] of Object.entries(STAGES)) {
    list.append(h("li", { title: meaning }, h("span", { class: `swatch stage-${name}`, "aria-hidden": "true" }), name));
  }
}

// A bar of the stages, `longest` seconds wide at most. Update it with `drawBar`.
export const stageBar = () => h("div", { class: "bar", role: "img" });

export function drawBar(bar, stages, longest) {
  const entries = Object.entries(stages).filter(([, duration]) => duration > 0);
  set(bar, "aria-label", entries.length ? entries.map(([name, s]) => `${name} ${seconds(s)}`).join(", ") : "no token yet");
  keyed(bar, entries, ([name]) => name, ([name]) => h("span", { class: `stage-${name}` }), (part, [name, duration]) => {
    part.style.width = `${(100 * duration) / longest}%`;
    set(part, "title", `${name} ${seconds(duration)}`);
  });
}

export function stageTable(stages, total) {
  const rows = Object.entries(stages).map(([name, duration]) => {
    const swatch = h("span", { class: `swatch stage-${name}`, "aria-hidden": "true" });
    const share = total ? `${Math.round((100 * duration) / total)}%` : "";
    return h("tr", {}, h("th", { scope: "row" }, swatch, name), h("td", { class: "number" }, seconds(duration)),
      h("td", { class: "number" }, share), h("td", { class: "muted" }, STAGES[name] ?? ""));
  });
  const head = ["stage", "time", "share", "what happens"].map((name, i) => h("th", { scope: "col", class: i % 3 ? "number" : null }, name));
  return h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows));
}
