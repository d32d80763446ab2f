// Time against memory: one point for each layout, with the capacity of a device as a line.

const EDGE = { left: 62, right: 16, top: 36, bottom: 40 };

// A scale from values to pixels: logarithmic where they differ by much.
function scaleOf(values, from, to) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const log = low > 0 && high / low > 8;
  if (log) {
    [low, high] = [low / 1.15, high * 1.15];
    return { log, low, high, at: (v) => from + ((to - from) * Math.log(v / low)) / Math.log(high / low) };
  }
  const room = (high - low || high || 1) * 0.08;
  [low, high] = [Math.max(0, low - room), high + room];
  return { log, low, high, at: (v) => from + ((to - from) * (v - low)) / (high - low) };
}

// About `most` round values of a scale; `base` is 2 for bytes and 10 for seconds.
function ticksOf(scale, base, most) {
  const found = [];
  if (scale.log) {
    const steps = base === 2 ? [1] : [1, 2, 5];
    for (let power = Math.floor(Math.log(scale.low) / Math.log(base)) - 1; base ** power <= scale.high; power += 1) {
      for (const step of steps) if (step * base ** power >= scale.low && step * base ** power <= scale.high) found.push(step * base ** power);
    }
    const every = Math.ceil(found.length / most);
    return found.filter((_, i) => i % every === 0);
  }
  const unit = base === 2 ? 1024 ** Math.floor(Math.log(scale.high) / Math.log(1024)) : 1;
  const rough = (scale.high - scale.low) / unit / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) * unit;
  for (let value = Math.ceil(scale.low / step) * step; value <= scale.high; value += step) found.push(value);
  return found;
}

class Front {
  // `pick(number)` is called when a point is chosen.
  constructor(element, found, colours, pick) {
    [this.found, this.colours, this.pick, this.chosen] = [found, colours, pick, null];
    this.tip = make("div", { class: "tip", hidden: true, "aria-hidden": true });
    this.place = make("div");
    element.classList.add("plot");
    element.append(this.place, this.tip);
    this.element = element;
    let width = 0;
    new ResizeObserver(() => { if (element.clientWidth !== width) { width = element.clientWidth; this.draw(); } }).observe(element);
  }

  choose(number) {
    this.chosen = number;
    for (const point of this.place.querySelectorAll(".point")) {
      const mine = Number(point.dataset.number) === number;
      point.setAttribute("aria-pressed", mine);
      point.setAttribute("tabindex", mine ? 0 : -1);
    }
  }

  draw() {
    const { candidates, front } = this.found;
    const width = this.element.clientWidth || 480;
    const height = Math.round(Math.min(460, Math.max(300, width * 0.75)));
    const capacities = [...new Set(candidates.map((c) => c.capacity_bytes))].sort((a, b) => a - b);
    const peaks = candidates.map((c) => c.peak_bytes);
    // A capacity far beyond every point would only press them together.
    const shown = capacities.filter((c) => c <= 3 * Math.max(...peaks));
    const x = scaleOf([...peaks, ...shown], EDGE.left, width - EDGE.right);
    const y = scaleOf(candidates.map((c) => c.seconds), height - EDGE.bottom, EDGE.top);
    const [right, bottom] = [width - EDGE.right, height - EDGE.bottom];
    const parts = [];
    if (shown.length) {
      const last = x.at(shown[shown.length - 1]);
      parts.push(make("rect", { class: "over", x: last, y: EDGE.top, width: Math.max(0, right - last), height: bottom - EDGE.top }));
    }
    for (const value of ticksOf(x, 2, width > 500 ? 6 : 4)) {
      parts.push(make("line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: EDGE.top, y2: bottom }),
        make("text", { x: x.at(value), y: bottom + 15, "text-anchor": "middle" }, showBytes(value).replace(".0 ", " ")));
    }
    for (const value of ticksOf(y, 10, 6)) {
      parts.push(make("line", { class: "grid", x1: EDGE.left, x2: right, y1: y.at(value), y2: y.at(value) }),
        make("text", { x: EDGE.left - 6, y: y.at(value) + 4, "text-anchor": "end" }, showSeconds(value)));
    }
    parts.push(make("rect", { class: "frame", x: EDGE.left, y: EDGE.top, width: right - EDGE.left, height: bottom - EDGE.top }));
    for (const capacity of shown) {
      const at = x.at(capacity);
      const end = at > width / 2;
      parts.push(make("line", { class: "limit", x1: at, x2: at, y1: EDGE.top, y2: bottom }),
        make("text", { class: "limit-name", x: at + (end ? 0 : -4), y: EDGE.top - 7, "text-anchor": end ? "end" : "start" }, `capacity ${showBytes(capacity)}`));
    }
    const beyond = capacities.filter((c) => !shown.includes(c));
    if (beyond.length) {
      parts.push(make("text", { class: "limit-name", x: right, y: EDGE.top - 7, "text-anchor": "end" }, `capacity ${beyond.map(showBytes).join(", ")} →`));
    }
    const line = front.map((i) => candidates[i]).map((c, i) => `${i ? "L" : "M"}${x.at(c.peak_bytes)} ${y.at(c.seconds)}`).join(" ");
    if (front.length > 1) parts.push(make("path", { class: "front", d: line }));
    parts.push(
      make("text", { x: (EDGE.left + right) / 2, y: height - 6, "text-anchor": "middle" }, `peak memory of one device${x.log ? " (log scale)" : ""}`),
      make("text", { x: 4, y: 12 }, `step time${y.log ? " (log scale)" : ""}`));
    // The best are drawn last, above the others.
    const order = candidates.map((_, i) => i).reverse();
    parts.push(make("g", { role: "group", "aria-label": "Layouts, fastest first; the arrow keys move between them" },
      order.map((i) => this.point(candidates[i], i, x, y))));
    this.place.replaceChildren(make("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "presentation" }, parts));
    this.tip.hidden = true;
    if (this.chosen !== null) this.choose(this.chosen);
  }

  point(candidate, number, x, y) {
    const [cx, cy] = [x.at(candidate.peak_bytes), y.at(candidate.seconds)];
    const label = pointText(candidate, number);
    return make("g", {
      class: "point", role: "button", tabindex: -1, "data-number": number, "aria-label": label, "aria-pressed": false,
      style: `--c:var(${this.colours.get(candidate.strategy)})`,
      onclick: () => this.pick(number),
      onpointerenter: () => this.show(label, cx, cy), onpointerleave: () => { this.tip.hidden = true; },
      onkeydown: (event) => this.key(event, number),
    }, make("circle", { class: "halo", cx, cy, r: 12 }), markOf(candidate, cx, cy));
  }

  show(text, cx, cy) {
    this.tip.textContent = text;
    this.tip.hidden = false;
    const room = this.element.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(cx + 12, room))}px`;
    this.tip.style.top = `${cy + 14}px`;
  }

  key(event, number) {
    const { length } = this.found.candidates;
    const next = {
      ArrowRight: number + 1, ArrowDown: number + 1, ArrowLeft: number - 1, ArrowUp: number - 1, Home: 0, End: length - 1,
      Enter: number, " ": number,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const to = Math.max(0, Math.min(length - 1, next));
    this.pick(to);
    this.place.querySelector(`.point[data-number="${to}"]`).focus();
  }
}

// A dot fits, a cross does not; a ring is around what the compiler proved.
function markOf(candidate, cx, cy) {
  const marks = [];
  if (candidate.label === "compiled") marks.push(make("circle", { class: "ring", cx, cy, r: 8.5 }));
  if (candidate.fits) marks.push(make("circle", { class: "dot", cx, cy, r: 5.5 }));
  else marks.push(make("path", { class: "cross", d: `M${cx - 4} ${cy - 4}L${cx + 4} ${cy + 4}M${cx - 4} ${cy + 4}L${cx + 4} ${cy - 4}` }));
  return marks;
}

function pointText(candidate, number) {
  const cost = candidate.cost === null ? "" : `, ${showCost(candidate.cost)} per step`;
  return `${number + 1}: ${candidate.axes} ${candidate.strategy} on ${candidate.chips}, ${showStep(candidate)}: `
    + `${showSeconds(candidate.seconds)}, ${showBytes(candidate.peak_bytes)} of ${showBytes(candidate.capacity_bytes)}`
    + `${cost} (${candidate.label})${candidate.fits ? "" : "; does not fit"}`;
}

const showCost = (dollars) => `$${dollars >= 0.001 || !dollars ? dollars.toFixed(4) : Number(dollars.toPrecision(2))}`;
const REMATS = { dots_with_no_batch_dims_saveable: "dots", nothing_saveable: "all", "": "as given" };
const showRemat = (remat) => (remat === null ? "none" : REMATS[remat] || remat);
const showStep = (c) => [
  `remat ${showRemat(c.remat)}`,
  ...(c.accumulate > 1 ? [`${c.accumulate} microbatches`] : []),
  ...(c.loss_chunks > 1 ? [`loss in ${c.loss_chunks} chunks`] : []),
  ...(c.offload ? [`${c.offload} offloaded`] : []),
  ...(c.microbatches ? [`pipeline in ${c.microbatches} parts`] : []),
].join(", ");
