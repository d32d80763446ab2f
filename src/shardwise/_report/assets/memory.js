// Memory as a bar against the device's capacity, and its parts.

const PART_COLOURS = {
  parameters: "--cut0", optimizer: "--cut1", batch: "--cut2", temporaries: "--cut3", "outputs and padding": "--cut4",
};

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
