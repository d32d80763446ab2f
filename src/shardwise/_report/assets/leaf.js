// One leaf: its dims, what decided its spec, and how it is split: its shards, and who holds which.

// The slice of a leaf that a device holds: for each dim where it starts and ends.
function sliceOf(side, leaf, device) {
  const at = coordinates(side, device);
  return leaf.shape.map((size, dim) => {
    let number = 0;
    for (const axis of leaf.cuts[dim]) number = number * side.sizes[axis] + at[axis];
    return [number * leaf.shard[dim], (number + 1) * leaf.shard[dim]];
  });
}

const showSlice = (slice) => `[${slice.map(([from, to]) => `${from}:${to}`).join(", ")}]`;
const waysOf = (side, leaf) => leaf.cuts.map((axes) => axes.reduce((n, axis) => n * side.sizes[axis], 1));

function partNumber(side, leaf, device) {
  const ways = waysOf(side, leaf);
  return sliceOf(side, leaf, device).reduce((n, [from], dim) => n * ways[dim] + from / leaf.shard[dim], 0);
}

function partColour(number, parts) {
  if (parts === 1) return "var(--whole)";
  // Nearly one lightness, so that white text is readable; neighbours differ a little.
  return `oklch(${number % 2 ? 0.5 : 0.56} 0.13 ${Math.round((360 * number) / parts)})`;
}

// `name` is what its row is called, where that is one of several layers.
function showLeaf(element, side, leaf, members, name) {
  const several = members && members.length > 1;
  const title = make("h2", { id: "leaf-title", tabindex: -1 }, several && name ? name : leaf.path);
  const fact = (what, ...value) => make("div", { class: "fact" }, make("dt", {}, what), make("dd", {}, value));
  const facts = make("dl", { class: "facts-line" },
    fact("array", showShape(leaf.dtype, leaf.shape), " ", make("span", { class: "faint" }, leaf.kind)),
    fact("spec", make("code", {}, specText(side, leaf.spec))),
    ...(leaf.faults.length ? [] : [
      fact("on each device", `${showBytes(leaf.held)} of ${showBytes(leaf.bytes)} `, labelOf("exact")),
      fact("copies of each shard", `${leaf.copies}`)]),
    several ? fact("alike", `${members.length}, from ${members[0].path} to ${members[members.length - 1].path}`) : "");
  const names = leaf.names ? leaf.names.split(",") : [];
  const dims = table(["dim", "size", "name", "axes", "ways", "shard"],
    leaf.shape.map((size, dim) => [
      `${dim}`, `${size}`, names[dim] || "", (leaf.cuts[dim] || []).map((axis) => side.axes[axis]).join(", "),
      leaf.shard ? `${waysOf(side, leaf)[dim]}` : "", leaf.shard ? `${leaf.shard[dim]}` : "",
    ]), { right: [0, 1, 4, 5], label: "Dims" });
  const why = make("div", {}, make("p", {}, make("b", {}, "decided by "), leaf.reason),
    leaf.trail.length ? make("details", {}, make("summary", {}, `considered, in order: ${leaf.trail.length}`),
      make("ol", {}, leaf.trail.map((text) => make("li", {}, text)))) : null,
    leaf.faults.map((text) => make("p", { class: "bad-text" }, text)),
    // An error is among its faults already.
    (side.flags.get(leaf.path) || []).filter((finding) => finding.severity !== "error").map((finding) =>
      make("p", {}, make("b", { class: "severity" }, `${finding.code} ${finding.name}: `), `${finding.message}; ${finding.help}`)));
  element.replaceChildren(title, facts,
    make("div", { class: "columns" }, make("div", {}, leaf.shape.length ? dims : make("p", { class: "faint" }, "A scalar has no dims."), why),
      leaf.faults.length ? make("p", { class: "faint" }, "There is no drawing: the leaf cannot be split this way.") : drawing(side, leaf)));
}

function drawing(side, leaf) {
  const ways = waysOf(side, leaf);
  const parts = ways.reduce((a, b) => a * b, 1);
  const owner = Array.from({ length: side.devices }, (_, device) => partNumber(side, leaf, device));
  const holders = Array.from({ length: parts }, () => []);
  owner.forEach((part, device) => holders[part].push(device));
  const status = make("p", { class: "status", role: "status", id: "cut-status" });
  const cells = [];
  let chosen = 0;
  const tell = () => {
    const part = owner[chosen];
    const mates = holders[part].map((device) => showDevice(side, device));
    const shown = mates.length > 8 ? `${mates.slice(0, 8).join("; ")} and ${mates.length - 8} more` : mates.join("; ");
    status.textContent = `${showDevice(side, chosen)} holds ${showSlice(sliceOf(side, leaf, chosen))}, shard ${part + 1} of ${parts}; held by ${plural(mates.length, "device")}: ${shown}`;
    cells.forEach((cell, number) => cell.classList.toggle("chosen", number === part));
    grid.draw(chosen);
  };
  const pick = (device) => { chosen = device; tell(); };
  const grid = deviceGrid(side, {
    label: `Devices, coloured by the shard of ${leaf.path} that each holds`, chosen, pick,
    paint: (device) => ({
      fill: partColour(owner[device], parts), text: `${owner[device] + 1}`, mate: owner[device] === owner[chosen],
      title: `${showDevice(side, device)} holds ${showSlice(sliceOf(side, leaf, device))}, shard ${owner[device] + 1} of ${parts}`,
    }),
  });
  const array = arrayDrawing(side, leaf, ways, (part, cell) => {
    cells[part] = cell;
    cell.addEventListener("click", () => pick(holders[part][0]));
    return { fill: partColour(part, parts), title: `shard ${part + 1} of ${parts}: ${showSlice(sliceOf(side, leaf, holders[part][0]))}, held by ${plural(holders[part].length, "device")}` };
  });
  const box = make("div", { class: "drawing" },
    make("figure", {}, array, make("figcaption", {}, `The array in ${plural(parts, "shard")}`)),
    make("figure", {}, grid.element, make("figcaption", {}, `${plural(side.devices, "device")}, each with the number of its shard`)), status);
  tell();
  return box;
}

// The last two dims of the array are drawn as rows and columns, the others as panels.
function arrayDrawing(side, leaf, ways, paint) {
  const rank = ways.length;
  const [rows, columns] = [rank > 1 ? ways[rank - 2] : 1, rank ? ways[rank - 1] : 1];
  const outer = ways.slice(0, Math.max(0, rank - 2));
  const panels = outer.reduce((a, b) => a * b, 1);
  // A long strip is wrapped: lines of 32 side by side, or under each other.
  const wrapped = rows * columns > 64 && Math.min(rows, columns) === 1;
  const lines = Math.ceil((rows * columns) / 32);
  const [high, wide] = !wrapped ? [rows, columns] : rows === 1 ? [lines, 32] : [32, lines];
  const at = (part) => (wrapped && columns === 1 ? [Math.floor(part / 32), part % 32] : [part % wide, Math.floor(part / wide)]);
  const across = panelsAcross(panels, high, wide);
  const down = Math.ceil(panels / across);
  const cell = Math.max(4, Math.min(46, Math.floor(420 / Math.max(across * wide, down * high))));
  const gap = panels > 1 ? 10 : 0;
  const head = panels > 1 ? 13 : 0;
  const [w, h] = [wide * cell, high * cell];
  const [width, height] = [across * (w + gap) + 24, down * (h + gap + head) + 24];
  const picture = make("svg", {
    class: "array", role: "img", viewBox: `-18 -18 ${width} ${height}`, width, height,
    "aria-label": `${leaf.path} of shape ${leaf.shape.join(" by ")} is split into ${ways.join(" by ")} shards of ${leaf.shard.join(" by ")}.`,
  });
  for (let panel = 0; panel < panels; panel++) {
    const [px, py] = [(panel % across) * (w + gap), Math.floor(panel / across) * (h + gap + head) + head];
    if (panels > 1 && (w > 30 || panel === 0)) picture.append(make("text", { x: px, y: py - 3, class: "axis" }, panelName(leaf, outer, panel)));
    for (let part = 0; part < rows * columns; part++) {
      const [x, y] = at(part);
      const rect = make("rect", { x: px + x * cell + 0.5, y: py + y * cell + 0.5, width: cell - 1, height: cell - 1, class: "part" });
      const { fill, title } = paint(panel * rows * columns + part, rect);
      rect.setAttribute("fill", fill);
      rect.append(make("title", {}, title));
      picture.append(rect);
    }
  }
  if (rank > 1) picture.append(make("text", { x: -6, y: head + 4, class: "axis", transform: `rotate(-90 -6 ${head + 4})`, "text-anchor": "end" }, `dim ${rank - 2}`));
  if (rank) picture.append(make("text", { x: 0, y: -6, class: "axis" }, `dim ${rank - 1}`));
  return picture;
}

// As many panels per line as make the drawing closest to a square.
function panelsAcross(panels, high, wide) {
  let best = 1;
  const side = (across) => Math.max(across * (wide + 1), Math.ceil(panels / across) * (high + 1));
  for (let across = 1; across <= panels; across++) if (side(across) < side(best)) best = across;
  return best;
}

function panelName(leaf, outer, panel) {
  const at = [...outer].reverse().map((n) => { const i = panel % n; panel = Math.floor(panel / n); return i; }).reverse();
  return at.map((i, dim) => `${i * leaf.shard[dim]}:${(i + 1) * leaf.shard[dim]}`).join(", ");
}
