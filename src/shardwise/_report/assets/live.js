// What is alive when in a step: live bytes stacked by owner, with the peak and the capacity marked.

const LIVE_EDGE = { left: 64, right: 14, top: 30, bottom: 34 };
const RESIDENT = ["parameters", "optimizer", "batch", "outputs and padding", "code"];

// The colour of an owner is that of its kind, mixed a little further for each of the same kind.
function liveColours(owners) {
  const seen = new Map();
  return owners.map((owner) => {
    const nth = seen.get(owner.kind) || 0;
    seen.set(owner.kind, nth + 1);
    const kind = `var(--live-${owner.kind.replaceAll(" ", "-")})`;
    return nth ? `color-mix(in oklab, ${kind} ${Math.max(34, 100 - 17 * nth)}%, var(--live-mix))` : kind;
  });
}

// Round numbers up to `high`, about `most` of them; in powers of two for bytes.
function liveTicks(high, most, bytes) {
  const unit = bytes ? 1024 ** Math.max(0, Math.floor(Math.log(high) / Math.log(1024))) : 1;
  const rough = high / unit / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough) * unit;
  const found = [];
  for (let value = 0; value <= high * 1.0001; value += step) found.push(value);
  return found;
}

class LiveView {
  constructor(side) {
    const live = side.live;
    Object.assign(this, { live, side, chosen: live.peak, shown: live.peak, lit: null });
    this.timed = live.seconds.length > 0;
    this.ends = this.timed ? live.seconds : live.places;
    this.totals = live.places.map((_, i) => live.owners.reduce((sum, owner) => sum + owner.bytes[i], 0));
    this.colours = liveColours(live.owners);
    // Resident first, then kind by kind, the largest first; small ones on top.
    const ofKind = new Map();
    live.owners.forEach((owner) => ofKind.set(owner.kind, (ofKind.get(owner.kind) || 0) + owner.bytes[live.peak]));
    const rank = (owner) => (RESIDENT.includes(owner.kind) ? RESIDENT.indexOf(owner.kind) - 10 : owner.kind === "other" ? 1 : 0);
    this.order = live.owners.map((owner, i) => i).sort((a, b) => {
      const [one, two] = [live.owners[a], live.owners[b]];
      return rank(one) - rank(two) || ofKind.get(two.kind) - ofKind.get(one.kind) || (one.kind < two.kind ? -1 : one.kind > two.kind ? 1 : a - b);
    });
    this.plot = make("div", {
      class: "live-plot", tabindex: 0, role: "slider", "aria-label": "Moment of the step", "aria-valuemin": 1,
      "aria-valuemax": live.places.length, onkeydown: (event) => this.key(event),
    });
    this.head = make("h4", { class: "live-when" });
    this.runs = make("p", { class: "faint live-runs" });
    this.list = make("ul", { class: "live-owners", "aria-label": "Owners; the arrow keys move between them", onkeydown: (event) => this.step(event) });
    this.element = make("div", { class: "live" },
      make("div", { class: "live-figure" }, this.plot,
        make("p", { class: "faint live-help" }, "Point at a moment, or use the arrow keys; P is the peak. Choose an owner to follow it through the step.")),
      make("div", { class: "live-side" }, this.head, this.runs, this.list));
    this.items = live.owners.map((owner, i) => this.item(owner, i));
    this.plot.addEventListener("pointermove", (event) => this.show(this.momentAt(event)));
    this.plot.addEventListener("pointerleave", () => this.show(this.chosen));
    this.plot.addEventListener("click", (event) => { this.chosen = this.momentAt(event); this.show(this.chosen); });
    let width = 0;
    new ResizeObserver(() => { if (this.plot.clientWidth !== width) { width = this.plot.clientWidth; this.draw(); } }).observe(this.plot);
    this.show(this.chosen);
  }

  name(owner) {
    return [owner.kind === "other" ? "other, small" : owner.kind, owner.module, owner.place].filter(Boolean).join(" ");
  }

  item(owner, i) {
    const bytes = make("span", { class: "right" });
    const button = make("button", { type: "button", class: "live-owner", "aria-pressed": false, onclick: () => this.light(i) },
      make("span", { class: "swatch", style: `--c:${this.colours[i]}` }),
      make("span", { class: "live-name" }, make("b", {}, owner.kind === "other" ? "other, small" : owner.kind),
        owner.module ? ` ${owner.module}` : "", owner.place ? make("code", {}, owner.place) : null),
      bytes);
    return { row: make("li", {}, button), button, bytes };
  }

  when(moment) {
    const { live } = this;
    const end = this.ends[moment];
    const text = this.timed ? `${showSeconds(end)} of ${showSeconds(live.length)}` : `instruction ${(live.places[moment] + 1).toLocaleString("en")} of ${(live.length + 1).toLocaleString("en")}`;
    const loop = live.loops.find((one) => one.first <= moment && moment <= one.last);
    return `${text}${loop && loop.times > 1 ? `, in a loop of ${loop.times}` : ""}`;
  }

  show(moment) {
    const { live } = this;
    this.shown = moment;
    const total = this.totals[moment];
    this.head.textContent = `${moment === live.peak ? "Peak: " : ""}${showBytes(total)} alive`;
    this.runs.textContent = `At ${this.when(moment)}${live.running[moment] ? `: ${live.running[moment]}` : ""}`;
    const order = live.owners.map((owner, i) => [owner.bytes[moment], i]).filter(([bytes]) => bytes).sort((a, b) => b[0] - a[0]);
    this.list.replaceChildren(...order.map(([bytes, i]) => { this.items[i].bytes.textContent = showBytes(bytes); return this.items[i].row; }));
    this.stop(this.list.querySelector("button"));
    const most = order.slice(0, 3).map(([bytes, i]) => `${this.name(live.owners[i])} ${showBytes(bytes)}`).join("; ");
    this.plot.setAttribute("aria-valuenow", moment + 1);
    this.plot.setAttribute("aria-valuetext", `${this.when(moment)}: ${showBytes(total)} alive${moment === live.peak ? ", the peak" : ""}. ${most}`);
    if (this.cursor) this.move();
  }

  // The list is one stop of the Tab key.
  stop(chosen) {
    for (const button of this.list.querySelectorAll("button")) button.tabIndex = button === chosen ? 0 : -1;
  }

  step(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const buttons = [...this.list.querySelectorAll("button")];
    const next = buttons[buttons.indexOf(document.activeElement) + by];
    if (!by || !next) return;
    event.preventDefault();
    this.stop(next);
    next.focus();
  }

  light(i) {
    this.lit = this.lit === i ? null : i;
    this.items.forEach(({ button }, at) => button.setAttribute("aria-pressed", at === this.lit));
    this.element.classList.toggle("has-lit", this.lit !== null);
    for (const area of this.plot.querySelectorAll(".live-area")) area.classList.toggle("lit", Number(area.dataset.owner) === this.lit);
  }

  key(event) {
    const last = this.live.places.length - 1;
    const to = {
      ArrowRight: this.shown + 1, ArrowUp: this.shown + 1, ArrowLeft: this.shown - 1, ArrowDown: this.shown - 1,
      PageUp: this.shown + 10, PageDown: this.shown - 10, Home: 0, End: last, p: this.live.peak, P: this.live.peak,
    }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.chosen = Math.max(0, Math.min(last, to));
    this.show(this.chosen);
  }

  momentAt(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    const found = this.edges.findIndex((edge, i) => i > 0 && x < edge);
    return found < 0 ? this.live.places.length - 1 : found - 1;
  }

  // Where each moment begins and ends: as long as it takes, but never less than can be seen.
  spread(width) {
    const length = this.timed ? this.live.length : this.live.length + 1;
    const spans = this.ends.map((end, i) => Math.max(0, (this.timed ? end : end + 1) - (i ? this.ends[i - 1] + (this.timed ? 0 : 1) : 0)));
    const least = Math.min(2, width / spans.length / 2);
    const short = spans.filter((span) => (span / length) * width < least);
    const room = width - short.length * least;
    const sum = spans.filter((span) => (span / length) * width >= least).reduce((a, b) => a + b, 0) || 1;
    const edges = [LIVE_EDGE.left];
    for (const span of spans) edges.push(edges[edges.length - 1] + ((span / length) * width < least ? least : (span / sum) * room));
    return edges;
  }

  draw() {
    const { live, side } = this;
    const width = this.plot.clientWidth;
    if (!width) return;
    const height = width < 500 ? 260 : 330;
    const [right, bottom] = [width - LIVE_EDGE.right, height - LIVE_EDGE.bottom];
    this.edges = this.spread(right - LIVE_EDGE.left);
    const { edges } = this;
    const peak = this.totals[live.peak];
    const { capacity } = side.memory;
    const near = capacity && capacity <= 1.7 * peak;
    const high = Math.max(peak, near ? capacity : 0) * 1.06;
    const y = (bytes) => bottom - (bytes / high) * (bottom - LIVE_EDGE.top);
    const parts = [];
    for (const value of liveTicks(high, 5, true)) {
      parts.push(make("line", { class: "live-grid", x1: LIVE_EDGE.left, x2: right, y1: y(value), y2: y(value) }),
        make("text", { x: LIVE_EDGE.left - 7, y: y(value) + 4, "text-anchor": "end" }, showBytes(value).replace(".0 ", " ")));
    }
    for (const loop of live.loops) {
      const [from, to] = [edges[loop.first], edges[loop.last + 1]];
      parts.push(make("rect", { class: "live-loop", x: from, y: LIVE_EDGE.top, width: Math.max(0, to - from), height: bottom - LIVE_EDGE.top }));
      if (loop.times > 1 && to - from > 30) parts.push(make("text", { class: "live-loop-name", x: (from + to) / 2, y: bottom + 14, "text-anchor": "middle" }, to - from > 110 ? `loop ×${loop.times}, one drawn` : `×${loop.times}`));
    }
    parts.push(...this.areas(edges, y));
    parts.push(make("line", { class: "live-base", x1: LIVE_EDGE.left, x2: right, y1: bottom, y2: bottom }));
    const end = this.timed ? showSeconds(live.length) : `${(live.length + 1).toLocaleString("en")} instructions`;
    parts.push(make("text", { x: LIVE_EDGE.left, y: height - 4 }, "0"),
      make("text", { x: right, y: height - 4, "text-anchor": "end" }, `${end}${this.timed ? " (modelled)" : ""}`));
    if (near) {
      parts.push(make("line", { class: "live-capacity", x1: LIVE_EDGE.left, x2: right, y1: y(capacity), y2: y(capacity) }));
    }
    const at = (edges[live.peak] + edges[live.peak + 1]) / 2;
    const away = near && at > (LIVE_EDGE.left + right) / 2;
    if (capacity) {
      parts.push(make("text", {
        class: "live-capacity-name", x: away ? LIVE_EDGE.left + 4 : right, y: near ? y(capacity) - 5 : 12, "text-anchor": away ? "start" : "end",
      }, `capacity ${showBytes(capacity)}${near ? "" : " ↑"}`));
    }
    parts.push(make("line", { class: "live-peak", x1: at, x2: at, y1: 18, y2: bottom }));
    const flip = at > width * 0.6;
    parts.push(make("text", { class: "live-peak-name", x: at + (flip ? -5 : 5), y: 24, "text-anchor": flip ? "end" : "start" }, `peak ${showBytes(peak)}`));
    this.cursor = make("g", { class: "live-cursor" }, make("line", { y1: LIVE_EDGE.top, y2: bottom }), make("circle", { r: 4 }));
    this.y = y;
    parts.push(this.cursor);
    const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "presentation", "aria-hidden": true }, parts);
    this.plot.replaceChildren(svg);
    this.move();
  }

  areas(edges, y) {
    const { live } = this;
    const below = live.places.map(() => 0);
    return this.order.map((i) => {
      const owner = live.owners[i];
      const [over, under] = [[], []];
      owner.bytes.forEach((bytes, at) => {
        const [low, top] = [y(below[at]), y(below[at] + bytes)];
        over.push(`${edges[at].toFixed(1)} ${top.toFixed(1)}`, `${edges[at + 1].toFixed(1)} ${top.toFixed(1)}`);
        under.push(`${edges[at].toFixed(1)} ${low.toFixed(1)}`, `${edges[at + 1].toFixed(1)} ${low.toFixed(1)}`);
        below[at] += bytes;
      });
      return make("path", {
        class: `live-area${this.lit === i ? " lit" : ""}`, "data-owner": i, style: `fill:${this.colours[i]}`,
        d: `M${over.join("L")}L${under.reverse().join("L")}Z`,
      });
    });
  }

  move() {
    const [line, dot] = this.cursor.children;
    const x = (this.edges[this.shown] + this.edges[this.shown + 1]) / 2;
    for (const name of ["x1", "x2"]) line.setAttribute(name, x);
    dot.setAttribute("cx", x);
    dot.setAttribute("cy", this.y(this.totals[this.shown]));
  }
}

// The same as numbers: what each owner has at the peak, and at most.
function liveTable(side) {
  const { live } = side;
  const view = new Map();
  const rows = live.owners.map((owner) => {
    const most = Math.max(...owner.bytes);
    view.set(owner, most);
    return [owner.kind, owner.module, owner.place, showBytes(owner.bytes[live.peak]), showBytes(most), owner.label];
  });
  return make("details", { class: "live-table" }, make("summary", {}, "As a table"),
    table(["owner", "module", "line", "at the peak", "at most", ""], rows, { right: [3, 4], label: "Live memory by owner" }));
}

function liveSentence(side) {
  const { live } = side;
  const peak = live.owners.reduce((sum, owner) => sum + owner.bytes[live.peak], 0);
  const rest = live.compiled_bytes - peak;
  const part = peak / live.compiled_bytes;
  const how = live.label === "compiled" ? "lifetimes compiled" : "lifetimes modelled by the program's order";
  const gap = rest > 0.0005 * live.compiled_bytes ? `; ${showBytes(rest)} more is reserved between arrays` : "";
  return `${showBytes(peak)} alive at the peak, ${part >= 0.9995 ? "all" : `${(100 * part).toFixed(1)}%`} of the ${showBytes(live.compiled_bytes)} that the compiler reports${gap} (${how}${live.seconds.length ? ", seconds modelled" : ""}).`;
}

function liveSection(side) {
  const view = new LiveView(side);
  return make("div", { class: "live-section" }, make("h3", {}, "What is alive when"), make("p", { class: "faint" }, liveSentence(side)), view.element, liveTable(side));
}
