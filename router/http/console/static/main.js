// Asks the router once a second while the page is visible, and shows what it answers.

import { getJson, keys } from "./api.js";
import { Chat } from "./chat.js";
import { openDetails } from "./details.js";
import { byId, h, keyed, set, setText } from "./dom.js";
import { Fleet } from "./fleet.js";
import { FleetTable } from "./fleet_table.js";
import { bytes, clock, count } from "./format.js";
import { History } from "./history.js";
import { KeysDialog } from "./keys_dialog.js";
import { describe } from "./nodes.js";
import { Plot, Points, showLatencies } from "./plots.js";
import { showRequests } from "./requests.js";
import { legend } from "./stages.js";

const EVERY_MS = 1000;
const REQUESTS = 25;
const AT_FIRST = 200; // so that the plot is not empty

const history = new History();
const fleet = new Fleet(byId("fleet-picture"));
const plots = {
  ttft: new Plot(byId("plot-ttft"), "ttft", "Time to first token"),
  itl: new Plot(byId("plot-itl"), "itl", "Inter-token latency"),
};
const points = new Points();
const chat = new Chat();
const keysDialog = new KeysDialog(() => refresh());
const table = new FleetTable({ changed: refresh, failed: notice, askKeys: () => keysDialog.open() });
let asked = false; // for a key, so that closing the dialog is an answer
let timer = null;
let running = false;

async function refresh() {
  clearTimeout(timer);
  if (running) return;
  running = true;
  try {
    const [snapshot, { requests }] = await Promise.all([getJson("debug/console"), getJson(`debug/requests?limit=${points.isEmpty ? AT_FIRST : REQUESTS}`)]);
    history.add(snapshot);
    show(snapshot, requests);
    notice(null);
    asked = false;
  } catch (error) {
    failed(error);
  } finally {
    running = false;
    if (!document.hidden) timer = setTimeout(refresh, EVERY_MS);
  }
}

function show(snapshot, requests) {
  const rates = history.flowRates();
  const nodes = describe(snapshot, rates, history.tokenRates());
  showStatus(snapshot);
  showFigures(snapshot, rates);
  showPipeline(snapshot.work.requests);
  fleet.show(nodes, rates);
  table.show(nodes, snapshot);
  plots.ttft.show(history, points.take(requests, snapshot.at));
  plots.itl.show(history);
  showLatencies(history);
  showRequests(requests.slice(0, REQUESTS), openDetails);
  chat.showModels(snapshot.models);
  byId("admin-field").hidden = !snapshot.has_admin;
  setText(byId("updated"), `updated ${clock(new Date(snapshot.at * 1000))}`);
}

function showStatus(snapshot) {
  const degraded = snapshot.status !== "ready";
  const pill = byId("status");
  setText(pill, snapshot.is_ready ? (degraded ? "degraded" : "ready") : "not ready");
  set(pill, "class", `pill ${snapshot.is_ready ? (degraded ? "warn" : "good") : "bad"}`);
  set(pill, "title", snapshot.status);
  setText(byId("version"), snapshot.version);
  document.title = `${pill.textContent} · baton console`;
}

function showFigures(snapshot, rates) {
  const live = Object.values(snapshot.work.requests).reduce((sum, number) => sum + number, 0);
  const moved = [...rates.values()].reduce((sum, rate) => sum + rate, 0);
  const figures = [
    ["in flight", count(live)],
    ["output tokens/s", count(history.rate("tokens"))],
    ["prompt tokens/s", count(history.rate("promptTokens"))],
    ["KV moved", `${bytes(moved)}/s`],
    ["bottleneck", snapshot.bottleneck],
    ["failed", count(snapshot.work.num_ended.failed ?? 0)],
  ];
  const make = () => h("div", {}, h("dt"), h("dd"));
  keyed(byId("figures"), figures, ([name]) => name, make, (element, [name, value]) => {
    setText(element.firstChild, name);
    setText(element.lastChild, value);
  });
}

function showPipeline(states) {
  const make = () => h("li", {}, h("b"), " ", h("span"));
  keyed(byId("pipeline"), Object.entries(states), ([name]) => name, make, (item, [name, number]) => {
    setText(item.firstChild, String(number));
    setText(item.lastChild, name === "unplaced" ? "waiting for room" : name.replace("_", " "));
    set(item, "class", number ? "some" : "");
  });
}

function failed(error) {
  const pill = byId("status");
  if (error.status === 401) {
    setText(pill, "key needed");
    set(pill, "class", "pill warn");
    if (!asked) keysDialog.open();
    asked = true;
    if (keys.api) notice(error);
    return;
  }
  setText(pill, "no answer");
  set(pill, "class", "pill bad");
  notice(error);
}

// Shows what went wrong; null: nothing does.
function notice(error) {
  const line = byId("notice");
  line.hidden = !error;
  setText(line, error ? `The router does not answer as it should: ${error.message}` : "");
}

for (const button of document.querySelectorAll("dialog .close")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
legend(byId("legend"));
refresh();
