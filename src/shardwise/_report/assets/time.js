// How long a step takes: its parts, communication by axis, modules and lines, and the timeline.

const TIME_WORDS = {
  compute: "arithmetic", memory: "reading and writing main memory", communication: "waiting for links",
  launch: "starting kernels, and idle", unknown: "kernels without a model",
};

// The parts of a step as one bar, as long as the step is of `most`.
function timeStrip(time, most) {
  const parts = Object.entries(time.parts);
  const summary = parts.map(([name, seconds]) => `${name} ${showSeconds(seconds)}`).join(", ");
  return make("div", { class: "memory parts", role: "img", "aria-label": `Time of one step: ${summary} (modelled).` },
    parts.map(([name, seconds]) => make("span", {
      class: "piece", title: `${name}: ${showSeconds(seconds)}`,
      style: `width:${(100 * seconds) / most}%;background:var(${BOUND_COLOURS[name]})`,
    }, make("span", { class: "piece-name", "aria-hidden": true }, `${name} ${showShare(seconds, time.seconds)}`))));
}

function partsBar(time, most) {
  const parts = Object.entries(time.parts);
  const rows = parts.map(([name, seconds]) => [
    make("span", { title: TIME_WORDS[name] }, make("span", { class: "swatch", style: `--c:var(${BOUND_COLOURS[name]})` }), ` ${name}`),
    showSeconds(seconds), showShare(seconds, time.seconds), name in time.gains ? showSeconds(time.gains[name]) : "",
  ]);
  rows.push([make("b", {}, "step"), make("b", {}, showSeconds(time.seconds)), "", ""]);
  return make("div", {}, timeStrip(time, most), make("div", { class: "columns" },
    table(["", "time", "share", "gained if free"], rows, { right: [1, 2, 3], label: "Parts of a step" }), axesTable(time)));
}

function axesTable(time) {
  if (!time.communication.length) return null;
  const rows = time.communication.map((row) => [
    row.axes.join(", ") || "no axis", row.link, showSeconds(row.seconds), showSeconds(row.exposed), showSeconds(row.overlapped),
    make("span", { class: "bar wide", "aria-hidden": true, title: `${showShare(row.overlapped, row.seconds)} overlapped` },
      make("span", { class: "hatched", style: `width:${(100 * row.exposed) / time.communication[0].seconds}%;--c:var(--cut3)` }),
      make("span", { style: `width:${(100 * row.overlapped) / time.communication[0].seconds}%;--c:var(--cut3)` })),
  ]);
  return table(["communication over", "link", "time", "exposed", "overlapped", ""], rows, { right: [2, 3, 4], roomy: [5], label: "Communication by axis" });
}

// How long a step takes, and where the time goes; nothing where it is not known.
function showTime(element, side, go) {
  const { time } = side;
  element.hidden = !time;
  if (!time) { element.replaceChildren(); return null; }
  const timed = make("div", { id: "timed" });
  element.replaceChildren(make("h2", { id: "time-title" }, "Time of one step ", labelOf("modelled")),
    make("p", { class: "lead" }, time.verdict), partsBar(time, time.seconds), timed);
  return showTimed(timed, side, false, go);
}

const SHARE_VIEWS = {
  // Layers that repeat are one row.
  modules: { title: "by module", header: "module", of: (slice) => numberless(slice.module || slice.op) },
  lines: { title: "by line", header: "line", of: (slice) => slice.line },
  instructions: { title: "by instruction", header: "instruction", of: (slice) => slice.name },
};

// The timeline, and where the time goes, of one side.
// `go.module(name)` shows the leaves of a module, where there is such a place.
function showTimed(element, side, named, go) {
  const { time } = side;
  element.replaceChildren();
  if (!time) return null;
  let view = null;
  const detail = make("div", { class: "slice-box", id: "slice", role: "region", "aria-label": "The chosen slice", "aria-live": "polite" });
  const marked = make("p", { class: "status", role: "status" });
  const mark = (name, of) => {
    if (!view) return;
    view.mark(name === null ? null : (slice) => of(slice) === name);
    marked.replaceChildren(...(name === null ? [] : [`Highlighted: ${name} `, make("button", { type: "button", onclick: () => mark(null) }, "Show all")]));
  };
  const drawing = make("div", {});
  const shares = showShares(time, side.timeline && ((name, of) => { mark(name, of); drawing.scrollIntoView({ block: "nearest" }); }));
  // The host may take longer to launch a step than the device takes to run it.
  const idle = side.timeline ? time.seconds - side.timeline.seconds : 0;
  const late = idle > 0.001 * time.seconds ? `The device is busy for ${showSeconds(side.timeline.seconds)} and then idle for ${showSeconds(idle)}, until the host has launched the next step.` : "";
  const rates = [`Rates: ${time.rates}.`];
  if (Object.keys(time.unpriced).length) rates.push(`Priced by the memory they move alone: ${Object.entries(time.unpriced).map(([name, times]) => (times > 1 ? `${name} ×${times}` : name)).join(", ")}.`);
  element.append(make("h3", { id: "timeline-title" }, `Timeline of one device${named ? `: ${side.name}` : ""}`),
    side.timeline ? make("div", {}, late ? make("p", {}, late) : "", timelineLegend(side.timeline), drawing, marked, detail)
      : make("p", { class: "faint" }, "This compilation was read from a file, which has no program to draw a timeline of."),
    make("h3", {}, `Where the time goes${named ? `: ${side.name}` : ""}`), shares, make("p", { class: "faint" }, rates.join(" ")));
  if (!side.timeline) return null;
  const pick = (slice) => detail.replaceChildren(...sliceDetail(slice, time, {
    zoom: () => view.frame(slice), line: () => mark(slice.line, SHARE_VIEWS.lines.of),
    module: go && slice && go.module(slice.module), traffic: go && slice && slice.bound === "communication" && go.traffic,
  }));
  view = new TimelineView(drawing, side.timeline, { pick });
  pick(null);
  return view;
}

function timelineLegend(timeline) {
  const slices = timeline.streams.flatMap((stream) => stream.slices);
  const has = (test) => slices.some(test);
  const key = (name, text, extra = "") => make("span", { class: "key" }, make("span", { class: `swatch ${extra}`, style: `--c:var(${name})` }), text);
  const keys = Object.entries(BOUND_COLOURS).filter(([bound]) => has((slice) => slice.bound === bound))
    .map(([bound, name]) => key(name, bound === "communication" ? "communication, overlapped" : bound === "launch" ? "launch overhead" : bound === "unknown" ? "no model" : `bound by ${bound}`));
  if (has((slice) => slice.stream !== "compute" && slice.exposed)) keys.push(key("--cut3", "communication, exposed: compute waits", "hatched"));
  if (has((slice) => slice.count > 1)) keys.push(make("span", { class: "key" }, make("span", { class: "swatch dotted" }), "short kernels, drawn as one"));
  if (timeline.repeats.length) keys.push(key("--cell", "iterations like the last one drawn", "hatched-dark"));
  return make("div", { class: "legend" }, keys);
}

function sliceDetail(slice, time, act) {
  if (!slice) return [make("p", { class: "faint" }, "Choose a slice to see what it is and which line it comes from.")];
  const pairs = [];
  const say = (name, ...value) => pairs.push(make("dt", {}, name), make("dd", {}, value));
  if (slice.count > 1) say("longest", make("code", {}, slice.longest), `, and ${slice.count - 1} more`);
  if (slice.line) say("line", make("code", { class: "place" }, slice.line));
  else if (!slice.repeats) say("line", make("span", { class: "faint" }, "not in your code: added by the compiler or a library"));
  if (slice.module) say("module", make("code", {}, slice.module));
  if (slice.op) say("operation", make("code", {}, slice.op), slice.backward ? " in the backward pass" : "");
  if (!slice.repeats && slice.count === 1) say("instruction", make("code", {}, slice.name));
  const all = slice.busy * (slice.repeats ? 1 : slice.times);
  say("time", `${showSeconds(slice.busy)}${slice.times > 1 && !slice.repeats ? ` ×${slice.times} = ${showSeconds(all)}` : ""}, ${showShare(all, time.seconds)} of the step, from ${showSeconds(slice.start, 4)} to ${showSeconds(slice.end, 4)} on ${slice.stream}`);
  if (slice.bound) say("bound by", slice.bound);
  if (slice.axes) say("over", slice.axes);
  if (slice.stream !== "compute") say("exposed", slice.exposed ? `${showSeconds(slice.exposed)}: compute waits for it` : "no: all of it overlaps with other work");
  if (slice.bytes) say("memory", `${showBytes(slice.bytes)}, ${showBytes(slice.bytes / slice.busy)}/s`);
  if (slice.flops) say("arithmetic", `${showFlops(slice.flops)}, ${showFlops(slice.flops / slice.busy)}/s, ${showShare(slice.flops / slice.busy, time.peak_flops)} of the bfloat16 peak`);
  return [make("h4", {}, slice.title), make("dl", {}, pairs), make("div", { class: "tools" },
    make("button", { type: "button", onclick: act.zoom }, "Zoom to it"),
    slice.line ? make("button", { type: "button", onclick: act.line }, "Highlight its line") : "",
    act.module ? make("button", { type: "button", onclick: act.module }, "Show its leaves") : "",
    act.traffic ? make("button", { type: "button", onclick: act.traffic }, "All collectives by line") : "")];
}

// `mark(name, of)` highlights the slices whose `of` is a name; without it, names are plain text.
function showShares(time, mark) {
  const list = (name) => {
    const { header, title, of } = SHARE_VIEWS[name];
    const most = Math.max(...time[name].map((row) => row.seconds)) || 1;
    const cells = time[name].map((row) => [
      make("span", { class: "nowrap" }, mark ? make("button", { type: "button", class: "link", title: `${row.name}: highlight it in the timeline`, onclick: () => mark(row.name, of) }, row.name) : row.name,
        row.count > 1 ? make("span", { class: "times" }, ` ×${row.count}`) : ""),
      showSeconds(row.seconds), showShare(row.seconds, time.seconds),
      make("span", { class: "bar", "aria-hidden": true }, make("span", { style: `width:${(100 * row.seconds) / most}%;--c:var(--accent)` })),
      row.flops ? showFlops(row.flops) : "", row.bytes ? showBytes(row.bytes) : "",
    ]);
    const place = make("div", {});
    const show = (count) => place.replaceChildren(
      table([header, "time", "share", "", "flops", "memory"], cells.slice(0, count), { right: [1, 2, 4, 5], roomy: [4, 5], label: `Time ${title}` }),
      cells.length > count ? make("button", { type: "button", onclick: () => show(cells.length) }, `${cells.length - count} more`) : "");
    show(12);
    return place;
  };
  return make("div", {}, make("div", { class: "columns wide" }, list("modules"), list("lines")),
    make("details", {}, make("summary", {}, "The longest instructions"), list("instructions")));
}
