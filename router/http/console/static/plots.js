// Latencies over the last minutes: median and p99 as lines.

import { byId, h, keyed, set, setText, svg } from "./dom.js";
import { seconds } from "./format.js";
import { SPAN_S } from "./history.js";

const HEIGHT = 170;
const MAX_POINTS = 1000;
const EDGE = { left: 58, right: 62, top: 10, bottom: 24 };
const SPANS = [[60, "1 min"], [150, "2.5 min"], [SPAN_S, "5 min"]];
const LINES = [["median", 0.5], ["p99", 0.99]];

export class Plot {
  // `name` of the histogram in History; `what` it is, in words.
  constructor(parent, name, what) {
    Object.assign(this, { parent, name, what });
    this.grid = svg("g");
    this.dots = svg("g");
    this.lines = svg("g");
    this.picture = svg("svg", { role: "img", height: HEIGHT }, this.grid, this.dots, this.lines);
    parent.append(this.picture);
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  // `points`: [seconds before now, value] of single requests.
  show(history, points = []) {
    this.points = points.filter(([at]) => at > -SPAN_S && at <= 0);
    const known = -Math.min(0, ...this.points.map(([at]) => at), history.age);
    this.span = SPANS.map(([span]) => span).find((span) => span >= known) ?? SPAN_S;
    this.series = LINES.map(([label, share]) => [label, history.series(this.name, share)]);
    set(this.picture, "aria-label", this.inWords());
    this.draw();
  }

  inWords() {
    const newest = this.series.map(([label, values]) => `${label} ${seconds(values.at(-1)?.[1])}`);
    return `${this.what} over the last ${this.span} seconds; now ${newest.join(", ")}`;
  }

  draw() {
    if (!this.series || !this.parent.clientWidth) return;
    const width = Math.max(240, this.parent.clientWidth);
    set(this.picture, "width", width);
    set(this.picture, "viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = [...this.series.flatMap(([, line]) => line), ...this.points].map(([, value]) => value);
    const top = niceTop(Math.max(0.001, ...values.filter(Number.isFinite)));
    const x = (at) => EDGE.left + (1 + at / this.span) * (width - EDGE.left - EDGE.right);
    const y = (value) => HEIGHT - EDGE.bottom - (value / top) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.drawGrid(x, y, top);
    keyed(this.dots, this.points, (point) => point[2], () => svg("circle", { r: 2.5, class: "dot" }), (dot, [at, value]) => {
      set(dot, "cx", x(at));
      set(dot, "cy", y(value));
    });
    const ends = labelPlaces(this.series, y);
    const make = ([label]) => svg("g", {}, svg("path", { class: label }), svg("text", { class: label }));
    keyed(this.lines, this.series, ([label]) => label, make, (group, [label, line]) => {
      set(group.firstChild, "d", pathOf(line, x, y));
      set(group.lastChild, "x", x(0) + 6);
      set(group.lastChild, "y", ends.get(label) ?? 0);
      setText(group.lastChild, ends.has(label) ? label : "");
    });
  }

  drawGrid(x, y, top) {
    const marks = [0, 0.5, 1].map((share) => share * top);
    const rows = marks.map((value) => svg("g", {}, svg("path", { class: "grid", d: `M ${EDGE.left} ${y(value)} H ${x(0)}` }),
      svg("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, value ? seconds(value) : "0")));
    const [, longest] = SPANS.find(([span]) => span === this.span);
    const names = [[-this.span, `${longest} ago`, "start"], [0, "now", "end"]];
    const columns = names.map(([at, text, anchor]) => svg("text", { x: x(at), y: HEIGHT - 6, "text-anchor": anchor }, text));
    this.grid.replaceChildren(...rows, ...columns);
  }
}

// Where the names of the lines stand: at their ends, but not on each other.
function labelPlaces(series, y) {
  const places = new Map();
  let lowest = Infinity;
  for (const [label, line] of series) {
    const last = line.at(-1)?.[1];
    if (!Number.isFinite(last)) continue;
    lowest = Math.min(y(last) + 4, lowest - 13);
    places.set(label, Math.max(lowest, 10));
  }
  return places;
}

// Gaps where there was no observation.
function pathOf(line, x, y) {
  let command = "M";
  let path = "";
  for (const [at, value] of line) {
    if (Number.isFinite(value)) path += `${command}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    command = Number.isFinite(value) ? "L" : "M";
  }
  return path;
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

export function showLatencies(history) {
  const make = ([, label]) => h("tr", {}, h("th", { scope: "row" }, label), h("td"), h("td"), h("td"), h("td"));
  keyed(byId("latency-rows"), SPANS, ([span]) => span, make, (row, [span]) => {
    const cells = ["ttft", "itl"].flatMap((name) => LINES.map(([, share]) => seconds(history.quantile(name, share, span))));
    cells.forEach((text, i) => setText(row.children[i + 1], text));
  });
}

// The first tokens of single requests, as many as fit into the plot's time, and no more than MAX_POINTS.
export class Points {
  constructor() {
    this.known = new Map(); // request id -> [time, value]
  }

  get isEmpty() {
    return this.known.size === 0;
  }

  // [[seconds before now, value, request id], ...]
  take(requests, now) {
    for (const request of requests) {
      if (!request.first_token_s) continue;
      this.known.set(request.request_id, [new Date(request.received_at).getTime() / 1000, request.first_token_s]);
    }
    for (const [id, [at]] of this.known) {
      if (at < now - SPAN_S || this.known.size > MAX_POINTS) this.known.delete(id);
    }
    return [...this.known].map(([id, [at, value]]) => [at - now, value, id]);
  }
}
