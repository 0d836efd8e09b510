// The fleet as a picture: prefill nodes, decode nodes, and the KV that flows between them.

import { keyed, set, setText, svg } from "./dom.js";
import { bytes, percent, plural } from "./format.js";
import { MARKS } from "./nodes.js";

const CARD = { height: 74, gap: 14, least: 148, most: 300 };
const WIDE = 620; // from here on prefill is left and decode right, else above and below
const LINKS_SHOWN = 300;
const LABELS_SHOWN = 6; // more of them hide each other

export class Fleet {
  constructor(parent) {
    this.parent = parent;
    this.links = svg("g", { class: "links" });
    this.cards = svg("g");
    this.picture = svg("svg", { role: "img" }, this.links, this.cards);
    parent.append(this.picture);
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  show(nodes, rates) {
    this.nodes = nodes;
    this.rates = rates;
    this.draw();
  }

  draw() {
    if (!this.nodes) return;
    const { places, width, height, wide } = layout(this.nodes, this.parent.clientWidth);
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) {
      set(this.picture, name, value);
    }
    set(this.picture, "aria-label", inWords(this.nodes, this.rates));
    keyed(this.cards, this.nodes, (node) => node.address, makeCard, (card, node) => {
      drawCard(card, node, places.get(node.address));
    });
    const links = linksOf(this.nodes, this.rates, places);
    const labelled = wide && links.filter((link) => link.rate).length <= LABELS_SHOWN;
    keyed(this.links, links, (link) => link.key, makeLink, (group, link) => drawLink(group, link, wide, labelled));
  }
}

function inWords(nodes, rates) {
  const of = (role) => nodes.filter((node) => node.role === role);
  const total = [...rates.values()].reduce((sum, rate) => sum + rate, 0);
  const words = ["prefill", "decode"].map((role) => plural(of(role).length, `${role} node`)).join(" and ");
  const not = nodes.filter((node) => node.shown !== "up").map((node) => `${node.name} is ${node.shown}`);
  return [`${words}, ${bytes(total)} of KV a second between nodes`, ...not].join("; ");
}

// Places of the cards by address, in pixels. Wide: two areas side by side; else one below the other.
function layout(nodes, available) {
  const width = Math.max(available, 280);
  const wide = width >= WIDE;
  const between = wide ? Math.max(110, width * 0.22) : 64;
  const places = new Map();
  const areas = [["prefill", 0], ["decode", wide ? (width + between) / 2 : 0]];
  let height = 0;
  let top = 0;
  for (const [role, left] of areas) {
    const members = nodes.filter((node) => node.role === role);
    const area = wide ? (width - between) / 2 : width;
    const columns = Math.max(1, Math.min(Math.floor(area / (CARD.least + CARD.gap)), Math.ceil(members.length / 6) || 1,
      wide ? 8 : 2), wide ? 1 : Math.min(2, members.length));
    const cardWidth = Math.min(wide ? CARD.most : area, (area - (columns - 1) * CARD.gap) / columns);
    const shift = wide && role === "prefill" ? area - columns * (cardWidth + CARD.gap) + CARD.gap : 0;
    members.forEach((node, i) => {
      const x = left + shift + (i % columns) * (cardWidth + CARD.gap);
      const y = top + Math.floor(i / columns) * (CARD.height + CARD.gap) + 4;
      places.set(node.address, { x, y, width: cardWidth });
    });
    const used = Math.ceil(members.length / columns) * (CARD.height + CARD.gap) + 4;
    height = Math.max(height, top + used);
    if (!wide && members.length) top += used - CARD.gap + between;
  }
  return { places, width, height, wide };
}

function linksOf(nodes, rates, places) {
  const byIncarnation = new Map(nodes.filter((n) => n.incarnation).map((node) => [node.incarnation, node]));
  const active = [...rates].sort((a, b) => b[1] - a[1]).slice(0, LINKS_SHOWN);
  const pairs = new Map(active);
  const usable = (role) => nodes.filter((node) => node.role === role && node.incarnation && node.shown === "up");
  const [prefill, decode] = [usable("prefill"), usable("decode")];
  if (prefill.length * decode.length <= LINKS_SHOWN) {
    for (const p of prefill) for (const d of decode) {
      const key = `${p.incarnation} ${d.incarnation}`;
      if (!pairs.has(key)) pairs.set(key, 0);
    }
  }
  const links = [];
  for (const [key, rate] of pairs) {
    const [source, target] = key.split(" ").map((incarnation) => byIncarnation.get(incarnation));
    if (!source || !target) continue;
    // labels of crossing links stand side by side
    const position = nodes.indexOf(source) % 2 ? 0.64 : 0.36;
    links.push({ key, rate, position, from: places.get(source.address), to: places.get(target.address) });
  }
  return links;
}

const makeLink = () => svg("g", {}, svg("path", { class: "link" }), svg("text", { class: "rate" }));

// The point of a link's curve, 0 at its source and 1 at its target.
function at(share, x1, x2, y1, y2) {
  const rest = 1 - share;
  const late = 3 * share ** 2 * rest + share ** 3;
  const even = 1.5 * share * rest ** 2 + 1.5 * share ** 2 * rest + share ** 3;
  return [x1 + (x2 - x1) * even, y1 + (y2 - y1) * late];
}

function drawLink(group, { rate, from, to, position }, wide, labelled) {
  const [path, label] = group.children;
  const [x1, y1] = wide ? [from.x + from.width, from.y + CARD.height / 2] : [from.x + from.width / 2, from.y + CARD.height];
  const [x2, y2] = wide ? [to.x, to.y + CARD.height / 2] : [to.x + to.width / 2, to.y];
  const bend = wide ? `C ${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2}` : `C ${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2}`;
  set(path, "d", `M ${x1} ${y1} ${bend} ${x2} ${y2}`);
  set(path, "class", rate ? "link flowing" : "link");
  path.style.strokeWidth = rate ? `${Math.min(4, 1.2 + Math.log10(1 + rate / 1e5) / 2)}px` : "1px";
  const [x, y] = at(position, x1, x2, y1, y2);
  setText(label, rate && labelled ? `${bytes(rate)}/s` : "");
  set(label, "x", x);
  set(label, "y", y - 4);
}

function makeCard() {
  const part = (tag, attributes) => svg(tag, attributes);
  return svg("g", {}, svg("title"), part("rect", { class: "body", rx: 8, height: CARD.height }),
    part("text", { class: "name", x: 12, y: 21 }), part("text", { class: "state", y: 21, "text-anchor": "end" }),
    part("rect", { class: "track", x: 12, y: 32, height: 8, rx: 4 }), part("rect", { class: "usage", x: 12, y: 32, height: 8, rx: 4 }),
    part("text", { class: "load", x: 12, y: 60 }));
}

function drawCard(card, node, place) {
  const [title, body, name, state, track, usage, load] = card.children;
  set(card, "class", `card ${node.shown}`);
  set(card, "transform", `translate(${place.x} ${place.y})`);
  setText(title, `${node.name} (${node.address}): ${node.reason ?? node.shown}`);
  set(body, "width", place.width);
  set(state, "x", place.width - 12);
  setText(state, `${MARKS[node.shown]} ${node.shown}`);
  setText(name, clip(node.name, (place.width - 24 - 8 * (node.shown.length + 2)) / 7.5));
  set(track, "width", place.width - 24);
  set(usage, "width", Math.max(0, (place.width - 24) * node.usage));
  set(usage, "class", node.usage >= 0.9 ? "usage full" : "usage");
  const room = (place.width - 24) / 6.4;
  setText(load, clip(loadTexts(node).find((text) => text.length <= room) ?? loadTexts(node).at(-1), room));
}

// The longest first.
function loadTexts({ load, reason, usage }) {
  if (!load) return [reason ?? ""];
  const kv = `KV ${percent(usage)}`;
  return [
    `${kv} · ${load.num_running} running · ${load.num_waiting} waiting`,
    `${kv} · ${load.num_running} run · ${load.num_waiting} wait`,
    `${kv} · ${load.num_running}+${load.num_waiting}`,
  ];
}

const clip = (text, length) => (text.length > length ? `${text.slice(0, Math.max(1, Math.floor(length) - 1))}…` : text);
