// The verdict, memory as a bar against the device's capacity, and findings with their help.

const PART_COLOURS = {
  parameters: "--cut0", optimizer: "--cut1", batch: "--cut2", temporaries: "--cut3", "outputs and padding": "--cut4",
};

function verdictBox(side, named) {
  const words = { good: "good", bad: "does not work", warn: "with warnings", plain: "" };
  return make("div", { class: `verdict ${side.verdict.state}` },
    named ? make("b", {}, `${side.name}: `) : "",
    make("span", { class: "mark", "aria-hidden": true }, { good: "✓", bad: "✗", warn: "!", plain: "·" }[side.verdict.state]),
    make("span", { class: "hidden" }, words[side.verdict.state]),
    side.verdict.text.split("\n").map((line, i) => make(i ? "div" : "span", {}, line)),
    side.time ? make("div", { class: "time" }, side.time.verdict) : null);
}

function memoryBar(side, most) {
  const { parts, capacity, whole } = side.memory;
  const used = parts.reduce((total, [, bytes]) => total + bytes, 0);
  const summary = parts.map(([name, bytes, label]) => `${name} ${showBytes(bytes)} (${label})`).join(", ");
  const bar = make("div", {
    class: "memory", role: "img",
    "aria-label": `Memory of one device: ${summary}${capacity ? `; it has ${showBytes(capacity)}` : ""}.`,
  }, parts.map(([name, bytes, label]) => make("span", {
    class: "piece", title: `${name}: ${showBytes(bytes)} (${label})`,
    style: `width:${(100 * bytes) / most}%;background:var(${PART_COLOURS[name]})`,
  })), capacity ? make("span", { class: "limit", style: `left:${(100 * capacity) / most}%` }) : null);
  const rows = parts.map(([name, bytes, label]) => [
    make("span", {}, make("span", { class: "swatch", style: `--c:var(${PART_COLOURS[name]})` }), ` ${name}`),
    showBytes(bytes), capacity ? showShare(bytes, capacity) : showShare(bytes, used), label,
  ]);
  rows.push([make("b", {}, whole ? "peak" : "total"), make("b", {}, showBytes(used)), capacity ? showShare(used, capacity) : "", whole ? "compiled" : "exact"]);
  if (capacity) rows.push(["capacity", showBytes(capacity), "", ""]);
  return make("div", {}, bar, side.live ? liveSection(side) : null, make("div", { class: "live-parts" },
    table(["", "bytes", capacity ? "of the device" : "share", ""], rows, { right: [1, 2], label: "Memory of one device" }),
    largestBuffers(side)));
}

function showMemory(element, sides) {
  const need = (side) => Math.max(side.memory.capacity || 0, side.memory.parts.reduce((t, [, b]) => t + b, 0));
  const most = Math.max(...sides.map(need)) || 1;
  const columns = sides.map((side) => make("div", {},
    sides.length > 1 ? make("h3", {}, side.name) : null, memoryBar(side, most)));
  element.replaceChildren(make("h2", { id: "memory-title" }, "Memory of one device"), make("div", { class: sides.length > 1 ? "columns" : "" }, columns));
}

function largestBuffers(side) {
  if (!side.compiled || !side.compiled.buffers.length) return null;
  const label = side.live ? side.live.label : "sizes compiled, lifetimes modelled";
  return make("details", { open: true, class: "buffers" }, make("summary", {}, `Largest temporaries at the peak (${label})`),
    table(["shape", "", "bytes", "line", "module", "op"], side.compiled.buffers.map(([shape, count, bytes, place, module, op]) =>
      [shape, count > 1 ? `×${count}` : "", showBytes(bytes), place, module, short(op)]), { right: [2], label: "Largest temporaries" }));
}

function showFindings(element, side, pickPath) {
  const { findings } = side;
  const count = (severity) => findings.filter((f) => f.severity === severity).reduce((n, f) => n + 1 + f.more.length, 0);
  const title = make("h2", { id: "findings-title" }, findings.length
    ? `Findings: ${plural(count("error"), "error")}, ${plural(count("warning"), "warning")}` : "No findings");
  const known = new Set(side.leaves.map((leaf) => leaf.path));
  const place = (path) => (known.has(path) ? make("button", { type: "button", class: "link", onclick: () => pickPath(path) }, path) : path);
  const entries = findings.map((finding) => make("li", { class: `finding ${finding.severity}` },
    make("div", {}, make("b", {}, `${finding.severity}[${finding.code}] ${finding.name}: `), place(finding.path)),
    make("div", {}, finding.message), finding.context ? make("div", { class: "faint" }, finding.context) : null,
    finding.help ? make("div", {}, make("b", {}, "help: "), finding.help) : null,
    finding.more.length ? make("details", {}, make("summary", {}, `and ${finding.more.length} more like it, up to ${finding.more[finding.more.length - 1]}`),
      make("ul", {}, finding.more.slice(0, 200).map((path) => make("li", {}, place(path))))) : null));
  element.replaceChildren(title, make("ul", { class: "findings" }, entries));
}
