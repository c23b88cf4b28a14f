"use strict";
// The script of all pages: unpacks the page's data, draws the graph and the bars of a Run, filters, sorts, and follows
// fragments of the URL. It needs no network. `packed.py` packs the data, `model_graph.py` says what a graph has.

const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;
const $ = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
let data = {};
let graph = null;

function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function draw(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

async function unpack() {
  const element = document.getElementById("packed");
  if (!element) return {};
  const raw = Uint8Array.from(atob(element.textContent), c => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function fragment() {
  const text = location.hash.slice(1);
  try { return decodeURIComponent(text); } catch { return text; }
}

const toFragment = anchor => "#" + encodeURIComponent(anchor);
const cut = (text, most) => text.length <= most ? text : text.slice(0, Math.ceil(most / 2) - 1) + "\u2026" +
  text.slice(text.length - Math.floor(most / 2));
const figure = value => value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value >= 0.1 ? value.toFixed(2) :
  value.toPrecision(2);

// ---- texts that a section shows when it is opened ----

function fill(root) {
  for (const section of [root, ...all("details[data-html]", root)])
    if (section.open && section.dataset && section.dataset.html) {
      const part = document.createElement("div");
      part.innerHTML = data.texts[section.dataset.html];
      section.append(part);
      delete section.dataset.html;
    }
  for (const block of all("pre[data-text]", root)) {
    if (block.closest("details:not([open])")) continue;
    const text = data.texts[block.dataset.text];
    delete block.dataset.text;
    if (!block.classList.contains("diff")) { block.textContent = text; continue; }
    for (const line of text.split("\n"))
      block.append(make("span", { class: { "-": "gone", "+": "new", "@": "position" }[line[0]] || "same" }, line || " "));
  }
}

// ---- tables ----

function sortBy(head) {
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  const isNumber = head.classList.contains("r"), isUp = head.getAttribute("aria-sort") === "descending" ||
    (!isNumber && head.getAttribute("aria-sort") !== "ascending");
  for (const other of all("th", table)) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
  const key = row => {
    const text = row.cells[column].textContent;
    return isNumber ? (Number.isNaN(parseFloat(text)) ? -Infinity : parseFloat(text)) : text;
  };
  const rows = Array.from(body.rows).map(row => [key(row), row]);
  rows.sort(([x], [y]) => isNumber ? x - y : x.localeCompare(y, undefined, { numeric: true }));
  if (!isUp) rows.reverse();
  body.append(...rows.map(([, row]) => row));
}

// ---- the bar of a Run ----

function drawStrips() {
  for (const strip of all(".strip")) {
    const inside = make("div");
    for (const [amount, kind, anchor, hint] of data.strips[strip.dataset.strip]) {
      const block = kind ? make("a", { class: "k-" + kind, href: toFragment(anchor), title: hint, "data-kind": kind,
                                       "data-anchor": anchor }) : make("i", { title: hint });
      block.style.flex = `${amount} 0 0px`;
      inside.append(block);
    }
    strip.append(inside);
    let zoom = 1;
    const scale = factor => { zoom = Math.min(64, Math.max(1, zoom * factor)); inside.style.width = `${100 * zoom}%`; };
    const less = make("button", { "aria-label": "narrower blocks" }, "\u2212");
    const more = make("button", { "aria-label": "wider blocks" }, "+");
    less.onclick = () => scale(0.5);
    more.onclick = () => scale(2);
    strip.before(make("p", {}, "Width: ", less, " ", more));
  }
}

// ---- the graph ----

class Graph {
  constructor(element, given) {
    Object.assign(this, { element, given, scale: 1, chosen: null });
    this.total = given.steps.reduce((sum, step) => sum + step.a, 0) || 1;
    this.stepOf = new Map();
    given.steps.forEach((step, i) => step.n.forEach(n => {
      if (!this.stepOf.has(n) || step.a > given.steps[this.stepOf.get(n)].a) this.stepOf.set(n, i);
    }));
    this.anchors = new Map();
    given.nodes.forEach((node, i) => this.anchors.set(node.id, { node: i }));
    given.steps.forEach((step, i) => this.anchors.set(step.id, { step: i }));
    this.copied = new Set(given.copied);
    this.makers = new Map();
    this.readers = new Map();
    given.nodes.forEach((node, i) => {
      node.w.forEach(name => this.makers.set(name, i));
      node.i.forEach(name => this.readers.has(name) ? this.readers.get(name).push(i) : this.readers.set(name, [i]));
    });
    this.frame();
    this.show(Object.keys(given.views)[0]);
  }

  frame() {
    const bar = make("div", { class: "bar", role: "toolbar", "aria-label": "graph" });
    this.choices = {};
    for (const name of Object.keys(this.given.views)) {
      const choice = this.choices[name] = make("button", { "aria-pressed": "false" }, `by ${name}`);
      choice.onclick = () => { this.show(name); this.again(); };
      bar.append(choice);
    }
    const button = (text, label, act) => { const made = make("button", { "aria-label": label }, text); made.onclick = act; bar.append(made); };
    button("\u2212", "smaller", () => this.zoom(this.scale / 1.25));
    button("+", "larger", () => this.zoom(this.scale * 1.25));
    button("fit width", "fit width", () => this.fit());
    this.canvas = make("div", { class: "canvas", tabindex: "0", "aria-label": "graph; arrow keys follow edges" });
    this.panel = make("aside", { class: "panel", "aria-live": "polite" });
    this.element.append(bar, this.canvas, this.panel);
    this.canvas.addEventListener("keydown", event => this.key(event));
    this.canvas.addEventListener("click", event => {
      const box = event.target.closest(".box, .frame");
      if (box && !this.moved && box.dataset.anchor) go(box.dataset.anchor);
    });
    this.canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(this.scale * (event.deltaY < 0 ? 1.1 : 1 / 1.1), event);
    }, { passive: false });
    this.drag();
  }

  drag() {
    let from = null;
    this.canvas.addEventListener("pointerdown", event => {
      if (event.pointerType === "touch" || event.button) return;
      from = [event.clientX + this.canvas.scrollLeft, event.clientY + this.canvas.scrollTop];
      this.moved = false;
    });
    addEventListener("pointermove", event => {
      if (!from) return;
      const [x, y] = [from[0] - event.clientX, from[1] - event.clientY];
      this.moved ||= Math.abs(x - this.canvas.scrollLeft) + Math.abs(y - this.canvas.scrollTop) > 4;
      this.canvas.scrollTo(x, y);
    });
    addEventListener("pointerup", () => { from = null; });
  }

  show(name) {
    this.view = this.given.views[name];
    this.name = name;
    for (const [each, choice] of Object.entries(this.choices)) choice.setAttribute("aria-pressed", each === name);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${this.view.w} ${this.view.h}`);
    const defs = draw(svg, "defs");
    for (const kind of ["plain", "copy"]) {
      const marker = draw(defs, "marker", { id: "arrow-" + kind, class: kind, viewBox: "0 0 8 8", refX: 7, refY: 4,
        markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" });
      draw(marker, "path", { d: "M0 0L8 4L0 8z" });
    }
    const frames = draw(svg, "g"), edges = draw(svg, "g"), boxes = draw(svg, "g");
    this.most = Math.max(...this.view.boxes.map(box => box.a || 0), 1e-12);
    this.drawn = this.view.boxes.map(box => box.s === "cluster" ? this.drawFrame(frames, box) : this.drawBox(boxes, box));
    this.edges = [];
    this.view.edges.forEach(edge => this.drawEdges(edges, edge));
    this.canvas.replaceChildren(svg);
    this.svg = svg;
    this.fit();
    filter();
  }

  drawFrame(parent, box) {
    const [x, y, width, height] = box.p;
    const group = draw(parent, "g", { class: "frame", transform: `translate(${x} ${y})`, "data-anchor": box.id });
    draw(group, "rect", { class: "body", width, height, rx: 10 });
    draw(group, "text", { class: "title", x: 12, y: 20 }, box.l[0]);
    return group;
  }

  drawBox(parent, box) {
    const [x, y, width, height] = box.p, isPort = box.s === "port";
    const group = draw(parent, "g", { class: `box ${box.s} ${box.k ? "k-" + box.k : ""}`, transform: `translate(${x} ${y})`,
      "data-anchor": box.id, "data-kind": box.k || "" });
    draw(group, "title", {}, box.l.filter(Boolean).join("\n"));
    draw(group, "rect", { class: "body", width, height, rx: 6 });
    if (box.k) draw(group, "rect", { class: "stripe", width: 6, height: height - 2, x: 1, y: 1, rx: 3 });
    const amount = box.a ? `${figure(box.a)} ${this.given.unit}` : "";
    const left = isPort ? 14 : 13;
    draw(group, "text", { class: "title", x: left, y: isPort ? 14 : 15 }, cut(box.l[0], 21));
    box.l.slice(1).forEach((line, i) => line && draw(group, "text", { class: "small", x: left, y: (isPort ? 27 : 28) + 12 * i },
      cut(line, i && amount ? 16 : 26)));
    if (amount) draw(group, "text", { class: "small", x: width - 6, y: 40, "text-anchor": "end" }, amount);
    if (amount) {
      draw(group, "rect", { class: "track", x: 9, y: height - 5, width: width - 15, height: 3, rx: 1.5 });
      draw(group, "rect", { class: "amount", x: 9, y: height - 5, width: Math.max(1, (width - 15) * box.a / this.most), height: 3, rx: 1.5 });
    }
    return group;
  }

  drawEdges(parent, edge) {
    const curve = (x0, y0, x1, y1) => `C${x0} ${(y0 + y1) / 2} ${x1} ${(y0 + y1) / 2} ${x1} ${y1}`;
    const start = `M${edge.x} ${edge.y}V${edge.b}`;
    const copyDepth = Math.max(0, ...edge.e.filter(branch => branch[5]).map(branch => branch[1]));
    const trunk = edge.t.map(([x, top, bottom], i) => {
      const [fromX, fromY] = i ? [edge.t[i - 1][0], edge.t[i - 1][2]] : [edge.x, edge.b];
      const begin = i ? `M${fromX} ${fromY}` : start;
      return draw(parent, "path", { class: "edge" + (i < copyDepth ? " copy" : ""),
                                    d: begin + curve(fromX, fromY, x, top) + `V${bottom}` });
    });
    for (const [target, depth, end, isTurned, names, isCopy] of edge.e) {
      const [fromX, fromY] = depth ? [edge.t[depth - 1][0], edge.t[depth - 1][2]] : [edge.x, edge.b];
      const x = Math.abs(end - fromX) <= 3 ? fromX : end; // straight, where rounding would tilt it
      const kind = isCopy ? "copy" : "plain";
      const path = draw(parent, "path", { class: "edge " + kind, d: (depth ? `M${fromX} ${fromY}` : start) +
        curve(fromX, fromY, x, this.view.boxes[target].p[1]), [isTurned ? "marker-start" : "marker-end"]: `url(#arrow-${kind})` });
      draw(path, "title", {}, names.map(name => `${name} ${this.given.values[name] || ""}`).join("\n"));
      this.edges.push({ source: edge.s, target, paths: [...trunk.slice(0, depth), path] });
    }
  }

  fit() {
    this.zoom(Math.min(1.15, Math.max(0.45, (this.canvas.clientWidth - 4) / this.view.w)));
  }

  zoom(scale, at = null) {
    scale = Math.min(3, Math.max(0.1, scale));
    const area = this.canvas.getBoundingClientRect();
    const x = at ? at.clientX - area.left : area.width / 2, y = at ? at.clientY - area.top : 0, ratio = scale / this.scale;
    const [left, top] = [(this.canvas.scrollLeft + x) * ratio - x, (this.canvas.scrollTop + y) * ratio - y];
    this.scale = scale;
    this.svg.setAttribute("width", Math.ceil(this.view.w * scale));
    this.svg.setAttribute("height", Math.ceil(this.view.h * scale));
    this.canvas.scrollTo(left, top);
  }

  boxesOf({ node, step, cluster }) {
    const found = test => this.view.boxes.flatMap((box, i) => test(box) ? [i] : []);
    if (cluster !== undefined) return found(box => box.id === cluster);
    if (step === undefined) return found(box => (box.n || []).includes(node));
    const own = found(box => box.st === step), nodes = this.given.steps[step].n;
    return own.length ? own : found(box => (box.n || []).some(n => nodes.includes(n)));
  }

  find(anchor) {
    if (this.anchors.has(anchor)) return this.anchors.get(anchor);
    return this.view.boxes.some(box => box.s === "cluster" && box.id === anchor) ? { cluster: anchor } : null;
  }

  select(anchor) {
    const found = this.find(anchor);
    if (!found) return false;
    this.chosen = anchor;
    const boxes = new Set(this.boxesOf(found));
    this.drawn.forEach((element, i) => { element.classList.toggle("chosen", boxes.has(i)); element.classList.remove("near"); });
    for (const edge of this.edges) for (const path of edge.paths) path.classList.remove("chosen");
    for (const edge of this.edges)
      if (boxes.has(edge.source) || boxes.has(edge.target)) for (const path of edge.paths) path.classList.add("chosen");
    const [first] = boxes;
    if (first !== undefined) this.center(this.view.boxes[first].p);
    this.describe(found);
    return true;
  }

  again() { if (this.chosen) this.select(this.chosen); }

  center([x, y, width, height]) {
    const { clientWidth, clientHeight } = this.canvas, margin = Math.max(0, (clientWidth - this.view.w * this.scale) / 2);
    const tall = Math.min(height, clientHeight / this.scale);
    this.canvas.scrollTo(margin + (x + width / 2) * this.scale - clientWidth / 2, (y + tall / 2) * this.scale - clientHeight / 2);
  }

  key(event) {
    const way = { ArrowDown: ["source", "target"], ArrowUp: ["target", "source"] }[event.key];
    if (!way || !this.chosen) return;
    const boxes = new Set(this.boxesOf(this.find(this.chosen)));
    const top = i => this.view.boxes[i].p[1], distance = edge => Math.abs(top(edge.source) - top(edge.target));
    const [nearest] = this.edges.filter(each => boxes.has(each[way[0]]) && this.view.boxes[each[way[1]]].id)
      .sort((x, y) => distance(x) - distance(y));
    if (!nearest) return;
    event.preventDefault();
    go(this.view.boxes[nearest[way[1]]].id);
  }

  // ---- the panel ----

  describe({ node, step, cluster }) {
    const list = make("dl");
    const add = (term, ...parts) => parts.length && list.append(make("dt", {}, term), ...parts.map(part => make("dd", {}, part)));
    const link = i => make("a", { href: toFragment(this.given.nodes[i].id) }, `${this.given.nodes[i].o} ${this.given.nodes[i].t}`);
    const value = name => `${name} ${this.given.values[name] || ""}${this.copied.has(name) ? " (copied between host and device)" : ""}`;
    let title = cluster;
    if (step !== undefined) {
      const found = this.given.steps[step];
      title = found.t;
      const swatch = make("span", { class: `swatch k-${found.k}` });
      list.append(make("dd", {}, swatch, ` ${data.kinds[found.k]}, step ${step} of ${this.given.steps.length}`));
      add(this.given.unit === "MB" ? "memory traffic" : "time", `${figure(found.a)} ${this.given.unit}, ${(100 * found.a / this.total).toFixed(1)}\u00a0% of all steps`);
      add("computes", ...found.n.map(link));
      if (found.f.length) list.append(make("dt", {}, "tensors and launch"), make("dd", {}, make("pre", {}, found.f.join("\n"))));
    } else if (node !== undefined) {
      const found = this.given.nodes[node];
      title = `${found.o} ${found.t}`;
      add("runs on", found.p + (found.r ? `: ${found.r}` : ""));
      const own = this.stepOf.get(node);
      if (own !== undefined) add("step", make("a", { href: toFragment(this.given.steps[own].id) }, this.given.steps[own].t));
      for (const name of found.i) add("input", value(name), ...(this.makers.has(name) ? [link(this.makers.get(name))] : []));
      for (const name of found.w) add("output", value(name), ...(this.readers.get(name) || []).map(link));
    }
    const anchor = this.chosen, parts = [make("h3", {}, title), list];
    const row = document.getElementById(anchor);
    if (row) {
      const down = make("button", {}, step !== undefined ? "schedule, source of the kernel" : "go to it below");
      down.onclick = () => { reveal(row); };
      parts.push(make("p", {}, down));
    }
    this.panel.replaceChildren(...parts);
  }

  overview() {
    const most = [...this.given.steps].sort((x, y) => y.a - x.a).slice(0, 12).filter(step => step.a);
    const list = make("ol");
    for (const step of most)
      list.append(make("li", {}, make("span", { class: `swatch k-${step.k}` }), " ",
        make("a", { href: toFragment(step.id) }, step.t), ` ${figure(step.a)} ${this.given.unit}, ${(100 * step.a / this.total).toFixed(1)}\u00a0%`));
    const what = this.given.unit === "MB" ? "Steps that move most memory" : "Longest steps";
    this.panel.replaceChildren(...(most.length ? [make("h3", {}, what), list] : []),
      make("p", {}, "Choose a box, or type into the filter and press Enter. Arrow keys follow edges, Ctrl and the wheel zoom."));
  }

  match(hides) {
    let count = 0;
    const isShown = this.given.nodes.map((node, i) => {
      const step = this.given.steps[this.stepOf.get(i)];
      const shown = !hides([node.t, node.o, node.p, step ? step.t : "", ...node.i, ...node.w].join(" "), step ? step.k : "");
      count += shown;
      return shown;
    });
    this.view.boxes.forEach((box, i) => {
      const shown = !box.n || box.n.some(n => isShown[n]);
      this.drawn[i].classList.toggle("dim", !shown);
    });
    this.matches = this.view.boxes.filter((box, i) => box.n && !this.drawn[i].classList.contains("dim")).map(box => box.id);
    return count;
  }
}

// ---- filter ----

function filter() {
  const input = $("#filter");
  const words = (input ? input.value : "").toLowerCase().split(/\s+/).filter(Boolean);
  const kinds = new Set(all(".legend button[aria-pressed=true]").map(button => button.dataset.kind));
  const hides = (text, kind) => (kinds.size > 0 && !kinds.has(kind)) || !words.every(word => text.toLowerCase().includes(word));
  const rows = all("table.filtered tbody tr");
  let count = rows.length;
  for (const row of rows) {
    const isHidden = !words.every(word => row.textContent.toLowerCase().includes(word));
    row.classList.toggle("hidden", isHidden);
    count -= isHidden;
  }
  for (const block of all(".strip a")) block.classList.toggle("dim", hides(block.title, block.dataset.kind));
  let text = words.length ? `${count} of ${rows.length} rows` : "";
  if (graph) {
    const nodes = graph.match(hides);
    if (words.length || kinds.size) text = `${nodes} of ${graph.given.nodes.length} nodes`;
  }
  if (input) $(".count").textContent = text;
}

let turn = -1;
function next(step) {
  if (!graph || !graph.matches.length) return;
  turn = (turn + step + graph.matches.length) % graph.matches.length;
  go(graph.matches[turn]);
}

// ---- fragments ----

function go(anchor) {
  if (fragment() !== anchor) history.pushState(null, "", toFragment(anchor)); // keeps the focus, unlike location.hash
  follow();
}

function reveal(part) {
  for (const other of all("tr.chosen, details.chosen")) other.classList.remove("chosen");
  for (let outer = part; outer; outer = outer.parentElement) if (outer.tagName === "DETAILS") { outer.open = true; fill(outer); }
  if (part.matches("tr, details")) part.classList.add("chosen");
  part.scrollIntoView({ block: "center" });
}

function follow() {
  const anchor = fragment();
  if (!anchor) return;
  for (const block of all(".strip a")) block.classList.toggle("chosen", block.dataset.anchor === anchor);
  const part = document.getElementById(anchor);
  if (part) reveal(part);
  if (graph && graph.select(anchor)) graph.element.scrollIntoView({ block: "nearest" });
}

async function start() {
  for (const button of all("table.sortable th button")) button.onclick = () => sortBy(button.parentElement);
  data = await unpack();
  document.addEventListener("toggle", event => fill(event.target), true);
  drawStrips();
  const element = $(".graph");
  if (element && data.graph) { graph = new Graph(element, data.graph); graph.overview(); }
  fill(document.body);
  const input = $("#filter");
  if (input) {
    input.addEventListener("input", () => { turn = -1; filter(); });
    input.addEventListener("keydown", event => {
      if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") { input.value = ""; filter(); }
    });
  }
  for (const button of all(".legend button"))
    button.onclick = () => { button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true"); filter(); };
  addEventListener("keydown", event => {
    if (event.key === "/" && !event.target.closest("input") && input) { event.preventDefault(); input.focus(); }
  });
  addEventListener("hashchange", follow);
  follow();
  document.documentElement.dataset.ready = "1";
}

start();
