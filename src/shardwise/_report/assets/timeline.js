// When each instruction of a step runs: one row for each stream, to zoom, to pan and to go through.

const BOUND_COLOURS = {
  compute: "--cut0", memory: "--cut2", communication: "--cut3", launch: "--launch", unknown: "--cut5",
};
const KIND_FIELDS = ["name", "op", "module", "line", "axes", "bound", "backward", "bytes", "flops"];
const LANE = { axis: 20, label: 17, bar: 28, gap: 8, strip: 10 };

// Returns the slices with named fields, in seconds.
function readTimeline(raw) {
  const kinds = raw.kinds.map((row) => Object.fromEntries(KIND_FIELDS.map((field, i) =>
    [field, i < 6 ? raw.texts[row[i]] : row[i]])));
  const streams = raw.streams.map(([name, rows], lane) => {
    const slices = rows.map(([kind, start, seconds, times, exposed, ...block], i) => {
      const slice = { ...kinds[kind], lane, i, stream: name, start: start / 1e9, seconds: seconds / 1e9, times, exposed: exposed / 1e9, count: 1 };
      slice.busy = slice.seconds;
      if (block.length) {
        const [count, busy, bound, bytes, flops] = block;
        Object.assign(slice, { count, busy: busy / 1e9, bound: raw.texts[bound], bytes, flops, longest: slice.name });
      }
      slice.end = slice.start + slice.seconds;
      slice.repeats = !slice.bound;
      slice.title = titleOf(slice);
      return slice;
    });
    return { name, slices, busy: slices.reduce((sum, s) => sum + (s.repeats ? 0 : s.busy * s.times), 0) };
  });
  return { seconds: raw.seconds, streams, repeats: streams.flatMap((stream) => stream.slices.filter((s) => s.repeats)) };
}

function titleOf(slice) {
  if (slice.repeats) return slice.name;
  if (slice.count > 1) return `${slice.count} short ${slice.stream === "compute" ? "kernels" : "transfers"}`;
  const what = slice.bound === "communication" ? slice.name.replace(/-start|[.\d]+$/g, "") : slice.op || slice.name;
  return slice.module ? `${what} ${slice.module}` : what;
}

// Round steps of about `wanted` seconds.
function roundStep(wanted) {
  const power = 10 ** Math.floor(Math.log10(wanted));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= wanted);
}

class TimelineView {
  // `pick(slice)` is called when one is chosen, and with null when none is.
  constructor(element, timeline, { pick }) {
    Object.assign(this, { timeline, pick, from: 0, to: timeline.seconds, chosen: null, matches: null });
    this.least = Math.max(2e-8, timeline.seconds * 1e-6);
    this.canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": this.describe(), "aria-describedby": "timeline-keys" });
    this.tip = make("div", { class: "tip", "aria-hidden": true, hidden: true });
    this.view = make("span", { class: "faint", "aria-live": "polite" });
    const button = (text, label, act) => make("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    this.box = make("div", { class: "lanes" }, this.canvas, this.tip);
    element.replaceChildren(
      make("div", { class: "tools" },
        button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)),
        button("◀", "Earlier", () => this.pan(-0.5)), button("▶", "Later", () => this.pan(0.5)),
        button("Whole step", "Show the whole step", () => this.look(0, timeline.seconds)), this.view),
      this.box,
      make("details", { class: "keys faint" }, make("summary", {}, "Drag to pan; click, then scroll to zoom, or hold Ctrl. Keyboard shortcuts"),
        make("p", { id: "timeline-keys" }, "← → go through a stream, ↑ ↓ switch streams, + − zoom, Shift with ← → pans, Enter zooms to the slice, 0 shows the whole step, Escape clears the selection.")));
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.draw();
  }

  describe() {
    const summary = this.timeline.streams.map((s) => `${s.name}: ${plural(s.slices.length, "slice")}, busy for ${showSeconds(s.busy)}`);
    return `Timeline of one step of ${showSeconds(this.timeline.seconds)} (modelled). ${summary.join("; ")}.`;
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => { if (!this.held) this.hover(null); });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("dblclick", (event) => { const slice = this.find(event); if (slice) this.frame(slice); });
  }

  // --- what is in view ---------------------------------------------------------------------------

  look(from, to) {
    const { seconds } = this.timeline;
    const span = Math.min(seconds, Math.max(this.least, to - from));
    this.from = Math.min(Math.max(0, from), seconds - span);
    this.to = this.from + span;
    this.draw();
  }

  // Around the pointer's time, the chosen slice, or the middle.
  zoom(factor, around) {
    const { chosen, from, to } = this;
    const middle = chosen && chosen.start < to && chosen.end > from ? (Math.max(from, chosen.start) + Math.min(to, chosen.end)) / 2 : (from + to) / 2;
    const at = around ?? middle;
    const span = Math.min(this.timeline.seconds, Math.max(this.least, (to - from) * factor));
    const start = at - ((at - from) / (to - from)) * span;
    this.look(start, start + span);
  }

  pan(share) {
    const by = share * (this.to - this.from);
    this.look(this.from + by, this.to + by);
  }

  frame(slice) {
    const margin = Math.max(slice.seconds, this.least);
    this.look(slice.start - margin, slice.end + margin);
  }

  timeAt(x) { return this.from + (x / this.width) * (this.to - this.from); }
  xOf(time) { return ((time - this.from) / (this.to - this.from)) * this.width; }
  top(lane) { return LANE.axis + lane * (LANE.label + LANE.bar + LANE.gap) + LANE.label; }

  // --- drawing -----------------------------------------------------------------------------------

  draw() {
    const width = this.box.clientWidth;
    if (!width) return;
    const { streams } = this.timeline;
    const height = this.top(streams.length) - LANE.label + LANE.strip + 2;
    const ratio = devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    Object.assign(this.canvas.dataset, { from: this.from, to: this.to });
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    this.colours = Object.fromEntries(Object.entries(BOUND_COLOURS).map(([bound, name]) => [bound, colourOf(name)]));
    for (const name of ["ink", "faint", "line", "soft", "cell", "accent", "paper"]) this.colours[name] = colourOf(`--${name}`);
    this.drawAxis(pen);
    streams.forEach((stream, lane) => this.drawLane(pen, stream, lane));
    this.drawStrip(pen);
    const whole = this.from <= 0 && this.to >= this.timeline.seconds;
    this.view.textContent = whole ? `${showSeconds(this.timeline.seconds)} (modelled)` : `${showSeconds(this.to - this.from)} from ${showSeconds(this.from)}`;
  }

  drawAxis(pen) {
    const step = roundStep((80 / this.width) * (this.to - this.from));
    pen.textBaseline = "top";
    pen.strokeStyle = this.colours.line;
    pen.fillStyle = this.colours.faint;
    const digits = Math.max(0, Math.ceil(Math.log10(this.to / step) + 1));
    for (let i = Math.ceil(this.from / step); i * step <= this.to; i++) {
      const x = Math.round(this.xOf(i * step)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, this.height - LANE.strip - 4);
      pen.stroke();
      const text = i ? showSeconds(i * step, digits) : "0";
      if (x + 6 + pen.measureText(text).width < this.width) pen.fillText(text, x + 4, 3);
    }
  }

  drawLane(pen, stream, lane) {
    const y = this.top(lane);
    pen.fillStyle = this.colours.soft;
    pen.fillRect(0, y, this.width, LANE.bar);
    // Iterations that are not drawn take all streams, as those that are drawn do.
    for (const one of this.timeline.repeats) {
      if (one.lane === lane) continue;
      this.hatch(pen, this.xOf(one.start), y, this.xOf(one.end) - this.xOf(one.start), this.colours.line, 9);
    }
    const { slices } = stream;
    let [low, high] = [0, slices.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (slices[middle].end < this.from) low = middle + 1; else high = middle;
    }
    for (let i = low; i < slices.length && slices[i].start <= this.to; i++) this.drawSlice(pen, slices[i], y);
    pen.textBaseline = "bottom";
    const label = `${stream.name} · busy ${showSeconds(stream.busy)}, ${showShare(stream.busy, this.timeline.seconds)}`;
    // The axis' lines do not cross the text.
    pen.fillStyle = this.colours.paper;
    pen.fillRect(0, y - LANE.label + 2, pen.measureText(label).width + 6, LANE.label - 2);
    pen.fillStyle = this.colours.ink;
    pen.fillText(label, 1, y - 2);
    if (this.chosen && this.chosen.lane === lane) this.outline(pen, this.chosen, y, 2.5);
    else if (this.over && this.over.lane === lane) this.outline(pen, this.over, y, 1.5);
  }

  drawSlice(pen, slice, y) {
    const x = Math.max(-2, this.xOf(slice.start));
    const right = Math.min(this.width + 2, this.xOf(slice.end));
    const w = Math.max(right - x, 0.75);
    pen.globalAlpha = this.matches && !this.matches(slice) ? 0.18 : 1;
    pen.fillStyle = slice.repeats ? this.colours.cell : this.colours[slice.bound] || this.colours.unknown;
    // A thin gap where there is room, so that neighbours of one colour stay distinguishable.
    pen.fillRect(x, y, w > 4 ? w - 1 : w, LANE.bar);
    if (slice.repeats) this.hatch(pen, x, y, w, this.colours.line, 9);
    if (slice.count > 1) this.dots(pen, x, y, w);
    if (slice.stream !== "compute" && slice.exposed && w > 2) {
      const from = Math.max(x, this.xOf(slice.end - slice.exposed));
      this.hatch(pen, from, y, x + w - from - (w > 4 ? 1 : 0), "rgba(255,255,255,.42)", 7);
    }
    if (w > 44) {
      pen.textBaseline = "middle";
      const text = clipped(pen, slice.title, w - 10);
      if (slice.exposed && slice.stream !== "compute") {
        pen.fillStyle = this.colours[slice.bound];
        pen.fillRect(x + 2, y + LANE.bar / 2 - 7, pen.measureText(text).width + 6, 14);
      }
      pen.fillStyle = slice.repeats ? this.colours.ink : "#fff";
      pen.fillText(text, x + 5, y + LANE.bar / 2 + 0.5);
    }
    pen.globalAlpha = 1;
  }

  hatch(pen, x, y, w, colour, step) {
    const [left, right] = [Math.max(-2, x), Math.min(this.width + 2, x + w)];
    if (right - left < 1) return;
    pen.save();
    pen.beginPath();
    pen.rect(left, y, right - left, LANE.bar);
    pen.clip();
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.beginPath();
    for (let at = left - LANE.bar - (left % step); at < right; at += step) { pen.moveTo(at, y + LANE.bar); pen.lineTo(at + LANE.bar, y); }
    pen.stroke();
    pen.restore();
  }

  // A line along the bottom marks what stands for many.
  dots(pen, x, y, w) {
    pen.fillStyle = "rgba(255,255,255,.7)";
    for (let at = x + 2; at < x + w - 2; at += 4) pen.fillRect(at, y + LANE.bar - 4, 2, 2);
  }

  outline(pen, slice, y, thick) {
    const [x, right] = [Math.max(-4, this.xOf(slice.start)), Math.min(this.width + 4, this.xOf(slice.end))];
    if (right < 0 || x > this.width) return;
    pen.strokeStyle = this.colours.ink;
    pen.lineWidth = thick;
    // Around a narrow one with room to see its colour.
    const narrow = Math.max(0, 5 - (right - x)) / 2;
    pen.strokeRect(x - narrow - 0.5, y - 1, right - x + 2 * narrow, LANE.bar + 2);
  }

  // Where the view is within the step.
  drawStrip(pen) {
    const y = this.height - LANE.strip;
    const { seconds } = this.timeline;
    pen.fillStyle = this.colours.cell;
    pen.fillRect(0, y, this.width, LANE.strip);
    pen.fillStyle = this.colours.accent;
    pen.fillRect((this.from / seconds) * this.width, y, Math.max(4, ((this.to - this.from) / seconds) * this.width), LANE.strip);
  }

  // --- the pointer -------------------------------------------------------------------------------

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  find(event) {
    const { x, y } = this.place(event);
    const lane = this.timeline.streams.findIndex((_, i) => y >= this.top(i) && y < this.top(i) + LANE.bar);
    if (lane < 0) return null;
    // Two pixels of grace: many slices are narrower than a pointer is steady.
    const [time, grace] = [this.timeAt(x), (2 / this.width) * (this.to - this.from)];
    let best = null;
    let nearest = grace;
    for (const slice of this.timeline.streams[lane].slices) {
      if (slice.start > time + grace) break;
      const away = Math.max(slice.start - time, time - slice.end, 0);
      if (away < nearest || (away === 0 && nearest === 0)) [best, nearest] = [slice, away];
    }
    return best;
  }

  wheel(event) {
    const zoomed = this.to - this.from < this.timeline.seconds;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      if (!zoomed) return;
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / this.width);
      return;
    }
    // A page that is scrolled past the timeline goes on scrolling.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.canvas) return;
    if (!zoomed && event.deltaY > 0 && !event.ctrlKey) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.003)))), this.timeAt(this.place(event).x));
    this.hover(this.find(event), event);
  }

  press(event) {
    if (event.button) return;
    const { x, y } = this.place(event);
    this.canvas.setPointerCapture(event.pointerId);
    const fingers = this.held ? { ...this.held.fingers, [event.pointerId]: x } : { [event.pointerId]: x };
    this.held = { x, from: this.from, to: this.to, moved: Object.keys(fingers).length > 1, strip: y >= this.height - LANE.strip - 2, fingers };
    if (this.held.strip) this.center(x);
  }

  center(x) {
    const half = (this.to - this.from) / 2;
    const at = (x / this.width) * this.timeline.seconds;
    this.look(at - half, at + half);
  }

  move(event) {
    const { held } = this;
    // A finger hides what is under it: a tap shows the slice below the timeline instead.
    if (!held) { this.hover(event.pointerType === "touch" ? null : this.find(event), event); return; }
    const { x } = this.place(event);
    const before = Object.values(held.fingers);
    held.fingers[event.pointerId] = x;
    const after = Object.values(held.fingers);
    if (after.length > 1) {
      const apart = (xs) => Math.max(8, Math.abs(xs[0] - xs[1]));
      this.zoom(apart(before) / apart(after), this.timeAt((after[0] + after[1]) / 2));
    } else if (held.strip) this.center(x);
    else if (held.moved || Math.abs(x - held.x) > 3) {
      held.moved = true;
      this.hover(null);
      const by = ((held.x - x) / this.width) * (held.to - held.from);
      this.look(held.from + by, held.to + by);
      this.canvas.style.cursor = "grabbing";
    }
  }

  release(event) {
    const { held } = this;
    this.held = null;
    this.canvas.style.cursor = "";
    if (held && !held.moved && !held.strip && event.type === "pointerup") this.choose(this.find(event));
  }

  // --- what is shown of a slice ------------------------------------------------------------------

  hover(slice, event) {
    if (!this.held) this.canvas.style.cursor = slice ? "pointer" : "";
    const changed = slice !== this.over;
    this.over = slice;
    if (changed) {
      this.draw();
      this.tip.hidden = !slice;
      if (slice) this.tip.replaceChildren(...sliceLines(slice).map((text, i) => make(i ? "div" : "b", {}, text)));
    }
    if (!slice) return;
    const { x } = this.place(event);
    const left = x + 14 + this.tip.offsetWidth > this.width ? x - 14 - this.tip.offsetWidth : x + 14;
    Object.assign(this.tip.style, { left: `${Math.max(0, Math.min(left, this.width - this.tip.offsetWidth))}px`, top: `${this.top(slice.lane) + LANE.bar + 6}px` });
  }

  choose(slice) {
    this.chosen = slice;
    this.draw();
    this.pick(slice);
  }

  // Only the slices that `matches` returns true for keep their colour; with null, all do.
  mark(matches) {
    this.matches = matches;
    this.draw();
  }

  key(event) {
    const act = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "_": () => this.zoom(2),
      0: () => this.look(0, this.timeline.seconds), Home: () => this.step(-Infinity), End: () => this.step(Infinity),
      ArrowLeft: () => (event.shiftKey ? this.pan(-0.25) : this.step(-1)), ArrowRight: () => (event.shiftKey ? this.pan(0.25) : this.step(1)),
      ArrowUp: () => this.change(-1), ArrowDown: () => this.change(1),
      Enter: () => this.chosen && this.frame(this.chosen), Escape: () => { this.hover(null); this.choose(null); },
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  step(by) {
    const { chosen, timeline } = this;
    const { slices } = timeline.streams[chosen ? chosen.lane : 0];
    if (!slices.length) return;
    const first = slices.findIndex((slice) => slice.end > this.from);
    this.go(slices[Math.max(0, Math.min(slices.length - 1, chosen ? chosen.i + by : Number.isFinite(by) ? first : by))]);
  }

  // To the slice of another stream that is nearest in time.
  change(by) {
    const { streams } = this.timeline;
    if (!this.chosen) { this.step(1); return; }
    const to = streams[Math.max(0, Math.min(streams.length - 1, this.chosen.lane + by))];
    const at = this.chosen.start;
    const away = (slice) => Math.max(slice.start - at, at - slice.end, 0);
    if (to.slices.length) this.go(to.slices.reduce((best, slice) => (away(slice) < away(best) ? slice : best)));
  }

  go(slice) {
    this.choose(slice);
    const span = this.to - this.from;
    if (slice.end < this.from || slice.start > this.to) this.look(slice.start - span / 2, slice.start + span / 2);
  }
}

// What a slice is, in a few short lines.
function sliceLines(slice) {
  if (slice.repeats) return [slice.name, `${showSeconds(slice.seconds)} from ${showSeconds(slice.start)}`];
  const lines = [slice.title];
  if (slice.count > 1) lines.push(`longest: ${slice.op || slice.longest}`);
  else if (slice.op && !slice.title.startsWith(slice.op)) lines.push(slice.op);
  lines.push(slice.line || "no line of your code");
  lines.push(`${showSeconds(slice.busy)}${slice.times > 1 ? ` ×${slice.times}` : ""}, bound by ${slice.bound}${slice.axes ? ` over ${slice.axes}` : ""}`);
  const work = [slice.bytes ? `${showBytes(slice.bytes)} ${slice.bound === "communication" ? "communicated" : "of memory traffic"}` : "", slice.flops ? showFlops(slice.flops) : ""].filter(Boolean);
  if (work.length) lines.push(work.join(", "));
  if (slice.stream !== "compute") lines.push(slice.exposed ? `${showSeconds(slice.exposed)} exposed` : "overlapped");
  return lines;
}
