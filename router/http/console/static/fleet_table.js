// The nodes as a table, with what operators may do to them.

import { admin, keys } from "./api.js";
import { byId, h, keyed, set, setText } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { MARKS } from "./nodes.js";

const HEADS = ["node", "role", "state", "KV in use", "running", "waiting", "tokens/s", "KV moved", "model", "version"];

export class FleetTable {
  // `changed` is called after a change of the fleet, `failed` with the error of one, `askKeys` to ask for keys.
  constructor({ changed, failed, askKeys }) {
    this.changed = changed;
    this.failed = failed;
    this.unlock = h("button", { type: "button", click: askKeys }, "Enter the admin key to drain nodes");
    this.readOnly = h("span", { class: "muted" }, "Read-only: the router has no --admin-api-key.");
    this.problems = byId("fleet-problems");
  }

  show(nodes, snapshot) {
    const mayAct = snapshot.has_admin && Boolean(keys.admin);
    byId("fleet-actions").replaceChildren(...(mayAct ? [] : [snapshot.has_admin ? this.unlock : this.readOnly]));
    const heads = mayAct ? [...HEADS, "action"] : HEADS;
    keyed(byId("fleet-head"), [heads], (names) => names.length, headRow, () => {});
    const make = () => h("tr", {}, ...heads.map((_, i) => h(i ? "td" : "th", i ? {} : { scope: "row" })));
    keyed(byId("fleet-rows"), nodes, (node) => `${node.address} ${heads.length}`, make, (row, node) => {
      drawRow(row, node);
      if (mayAct) this.drawAction(row.lastElementChild, node);
    });
    const troubled = [...nodes.filter((node) => node.reason).map((node) => [node.address, problemOf(node)]),
      ...snapshot.problems.map((text) => [text, text])];
    keyed(this.problems, troubled, ([key]) => key, () => h("li"), (item, [, text]) => setText(item, text));
  }

  drawAction(cell, node) {
    const drains = node.state === "draining";
    const action = drains ? "Resume" : "Drain";
    if (!cell.firstChild) cell.append(h("button", { type: "button", click: () => this.act(cell.node) }));
    cell.node = node;
    setText(cell.firstChild, action);
    set(cell.firstChild, "aria-label", `${action} ${node.name}`);
    set(cell.firstChild, "disabled", node.state === "connecting");
  }

  async act(node) {
    try {
      if (node.state === "draining") await admin("admin/nodes", { role: node.role, address: node.address });
      else if (await confirmed(node)) await admin(`admin/nodes/${encodeURIComponent(node.address)}/drain`);
      else return;
      this.changed();
    } catch (error) {
      if (error.status === 401) keys.admin = "";
      this.failed(error);
    }
  }
}

const headRow = (names) => h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)));

const problemOf = (node) => `${MARKS[node.shown]} ${node.role} node ${node.name} ${node.shown === "down" ? "is down: " : ""}${node.reason}`;

function drawRow(row, node) {
  const load = node.load;
  const texts = [
    node.name, node.role, `${MARKS[node.shown]} ${node.shown}`, load ? percent(node.usage) : "–",
    load ? (node.num_seats ? `${load.num_running} of ${node.num_seats}` : String(load.num_running)) : "–",
    load ? String(load.num_waiting) : "–", count(node.tokensPerS), `${bytes(node.bytesPerS)}/s`, node.model ?? "–", node.version ?? "–",
  ];
  texts.forEach((text, i) => setText(row.children[i], text));
  set(row, "class", node.shown);
  set(row, "title", node.address);
}

// Asks before a node is drained.
function confirmed(node) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), `Drain ${node.name}?`);
  setText(byId("confirm-text"), "It gets no new requests, finishes those that it has, and is then removed from this "
    + `router. To take it back later: POST /admin/nodes with the role ${node.role} and the address ${node.address}.`);
  const yes = byId("confirm-yes");
  setText(yes, "Drain");
  return new Promise((resolve) => {
    yes.onclick = () => dialog.close("yes");
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
  });
}
