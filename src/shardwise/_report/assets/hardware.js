// The devices of a mesh as the hardware joins them: hosts, or slices of a torus, and the links between.

// The most devices that are drawn one by one, with their links.
const MOST_DRAWN = 1024;

// What each set of mesh axes carries in a step: bytes that one device sends, and how far they go.
function axisTraffic(side) {
  if (!side.traffic) side.traffic = readTraffic(side);
  return side.traffic;
}

function readTraffic(side) {
  const found = new Map();
  side.axes.forEach((axis, i) => { if (side.sizes[i] > 1) found.set(axis, { name: axis, axes: [i], bytes: 0, crossing: 0, kinds: new Map(), hosts: 0 }); });
  for (const row of collectivesOf(side)) {
    const name = row.axes.join(", ");
    if (!name) continue;
    const sum = found.get(name) || { name, axes: row.axes.map((axis) => side.axes.indexOf(axis)), bytes: 0, crossing: 0, kinds: new Map(), hosts: 0 };
    sum.bytes += row.bytes;
    sum.hosts = Math.max(sum.hosts, row.hosts);
    if (row.hosts > 1) sum.crossing += row.bytes;
    sum.kinds.set(row.kind, (sum.kinds.get(row.kind) || 0) + row.times);
    found.set(name, sum);
  }
  return [...found.values()].map((sum) => ({ ...sum, colour: mixedColour(sum.axes), spans: boxesOf(side, groupOfAxes(side, 0, sum.axes)) }));
}

function mixedColour(axes) {
  const [first, ...rest] = axes.map((axis) => `var(--axis${axis % 6})`);
  return rest.reduce((mixed, colour) => `color-mix(in oklab, ${mixed}, ${colour})`, first);
}

// The devices that differ from one in some axes alone, itself among them.
function groupOfAxes(side, device, axes) {
  const at = coordinates(side, device);
  let found = [device];
  for (const axis of axes) {
    const stride = side.sizes.slice(axis + 1).reduce((a, b) => a * b, 1);
    found = found.flatMap((one) => Array.from({ length: side.sizes[axis] }, (_, i) => one + (i - at[axis]) * stride));
  }
  return found.sort((a, b) => a - b);
}

// The first of them: a group's number.
function firstOfGroup(side, device, axes) {
  const at = coordinates(side, device);
  return axes.reduce((first, axis) => first - at[axis] * side.sizes.slice(axis + 1).reduce((a, b) => a * b, 1), device);
}

const boxOf = (side, device) => Math.floor(device / side.hardware.local);
const boxesOf = (side, devices) => new Set(devices.map((device) => boxOf(side, device))).size;
const boxWord = (side, count = 1) => plural(count, side.hardware.kind === "tpu" ? "slice" : "host");

// Where the traffic of a row of collectives goes, in words; nothing where there is one host alone.
function reachOf(side, row) {
  const { kind, boxes } = side.hardware;
  if (!row.hosts) return "";
  if (row.hosts > 1) return `crosses ${boxWord(side, row.hosts)}`;
  return boxes > 1 ? `inside ${kind === "tpu" ? "a slice" : "a host"}` : "";
}

function hardwareSentence(side) {
  const { kind, boxes, local, sizes, wraps, chip } = side.hardware;
  if (side.devices === 1) return "One device.";
  if (kind === "gpu" && boxes * local === side.devices && chip) {
    const inside = local > 1 ? `${boxes > 1 ? "each with " : "with "}${plural(local, "GPU")} on NVLink` : "one GPU each";
    return `${boxWord(side, boxes)} ${inside}${boxes > 1 ? "; the network between them" : ""}.`;
  }
  if (sizes) {
    const dims = sizes.filter((size) => size > 1);
    const rings = sizes.filter((size, i) => size > 1 && wraps[i]).length;
    const shape = `${rings && dims.length > 1 ? "torus" : dims.length > 1 ? "grid" : "line"} of ${sizes.slice(0, dims.length > 2 ? 3 : 2).join(" × ")} chips`;
    const wrap = rings ? `, wrapped around in ${rings === dims.length ? "every dim" : plural(rings, "dim")}` : ", without wrap-around";
    return `${boxes > 1 ? `${boxWord(side, boxes)}, each a ` : "A "}${shape}${wrap}${boxes > 1 ? "; the data-center network between slices" : ""}.`;
  }
  if (kind === "cpu") return `${plural(side.devices, "CPU device")}${boxes > 1 ? ` on ${boxWord(side, boxes)}` : " of one host"}.`;
  if (kind === "none") return "A mesh without devices: every device is a cell, in the mesh's order.";
  return `${plural(side.devices, "device")} on ${boxWord(side, boxes)}.`;
}

// --- where everything is drawn ---------------------------------------------------------------------

// As large as fits, without scrolling sideways or filling the screen.
function wiringOf(side, width) {
  const small = side.devices > 64;
  const sizes = small ? [24, 19, 15, 12] : [52, 44, 36, 30, 26];
  const tried = sizes.map((cell) => wiringWith(side, width, cell, small ? 5 : Math.round(cell * 0.42)));
  const fits = tried.filter((one) => one.width <= width + 14 && one.height <= 480);
  // All boxes in a row, if they can be.
  return fits.find((one) => one.across === one.boxes.length) || fits[0] || tried[tried.length - 1];
}

function wiringWith(side, width, cell, gap) {
  const many = side.devices > MOST_DRAWN;
  const inner = many ? sharedCells(side) : side.hardware.places ? torusCells(side, width, cell + gap) : hostCells(side, width, cell + gap);
  const size = [inner.columns * (cell + gap) + gap, inner.rows * (cell + gap) + (inner.places ? gap : 0)];
  const [pad, head, lane] = [6, 18, 9];
  const box = [size[0] + 2 * pad, size[1] + head + pad];
  const crossing = many ? [] : axisTraffic(side).filter((one) => one.axes.length === 1 && one.spans > 1);
  const below = inner.boxes > 1 ? 16 + crossing.length * lane : 8;
  const across = Math.max(1, Math.min(inner.boxes, Math.floor((width + 14) / (box[0] + 14))));
  const boxes = Array.from({ length: inner.boxes }, (_, i) => ({
    x: (i % across) * (box[0] + 14), y: Math.floor(i / across) * (box[1] + below + 14), width: box[0], height: box[1],
  }));
  const at = inner.cells.map(({ box: number, x, y }) => ({
    x: boxes[number].x + pad + gap + x * (cell + gap), y: boxes[number].y + head + gap / 2 + y * (cell + gap),
  }));
  return {
    ...inner, cell, gap, boxes, at, crossing, lane, across,
    width: across * (box[0] + 14), height: Math.ceil(inner.boxes / across) * (box[1] + below + 14),
  };
}

function hostCells(side, width, step) {
  const { boxes, local } = side.hardware;
  const ours = boxes > 1 || side.hardware.kind === "gpu";
  // The last axes run along the columns, so that their links are straight.
  let columns = 1;
  for (const size of [...side.sizes].reverse()) {
    if (local % (columns * size) || columns * size > 16) break;
    columns *= size;
  }
  if (columns === 1) columns = Math.ceil(local / (local > 4 ? 2 : 1));
  if (!ours) columns = gridColumns(side).columns;
  columns = Math.max(1, Math.min(columns, Math.floor((width - 30) / step)));
  const cells = Array.from({ length: side.devices }, (_, d) => {
    const i = d % local;
    return { box: Math.floor(d / local), x: i % columns, y: Math.floor(i / columns), devices: [d] };
  });
  return { cells, columns, rows: Math.ceil(local / columns), boxes };
}

// The planes of a 3D torus stand side by side, or one below the other.
function torusCells(side, width, step) {
  const { places, sizes, cores, local, boxes } = side.hardware;
  const [wide, high, planes] = sizes;
  const each = cores > 1 ? 2 : 1;
  const most = Math.max(1, Math.min(planes, Math.floor((width / step - 0.6) / (wide * each + 0.7))));
  const perRow = Math.ceil(planes / Math.ceil(planes / most));
  const seen = new Map();
  const cells = Array.from({ length: side.devices }, (_, d) => {
    const [x, y, z] = places[d % local];
    const key = `${Math.floor(d / local)}/${x},${y},${z}`;
    const core = seen.get(key) || 0;
    seen.set(key, core + 1);
    return {
      box: Math.floor(d / local), devices: [d], place: [x, y, z], core,
      x: (z % perRow) * (wide * each + 0.7) + x * each + core * 0.82, y: Math.floor(z / perRow) * (high + 0.9) + y,
    };
  });
  return {
    cells, boxes, perRow, planes, columns: Math.min(planes, perRow) * (wide * each + 0.7) - 0.7, rows: Math.ceil(planes / perRow) * (high + 0.9) - 0.9,
    places: true,
  };
}

// Beyond what can be drawn: one cell for several devices that follow one another.
function sharedCells(side) {
  const { local } = side.hardware;
  let each = side.devices / local <= MOST_DRAWN && local > 1 ? local : 1;
  while (side.devices / each > MOST_DRAWN) each *= 2;
  const count = Math.ceil(side.devices / each);
  const columns = 32;
  const cells = Array.from({ length: count }, (_, i) => ({
    box: 0, x: i % columns, y: Math.floor(i / columns), devices: Array.from({ length: Math.min(each, side.devices - i * each) }, (_, k) => i * each + k),
  }));
  return { cells, columns, rows: Math.ceil(count / columns), boxes: 1, each };
}

// --- links -----------------------------------------------------------------------------------------

const middleOf = (wiring, i) => [wiring.at[i].x + wiring.cell / 2, wiring.at[i].y + wiring.cell / 2];

// Returns a path for each axis inside the boxes; on a torus, the links that its steps go over.
function insideWires(side, wiring) {
  const paths = side.axes.map(() => []);
  const other = [];
  if (wiring.each) return { paths, other };
  if (side.hardware.places) torusWires(side, wiring, paths, other);
  else {
    side.axes.forEach((_, axis) => {
      const stride = side.sizes.slice(axis + 1).reduce((a, b) => a * b, 1);
      for (let d = 0; d < side.devices; d++) {
        const at = Math.floor(d / stride) % side.sizes[axis];
        const next = d + stride;
        if (at + 1 < side.sizes[axis] && boxOf(side, d) === boxOf(side, next)) paths[axis].push(arc(middleOf(wiring, d), middleOf(wiring, next), axis));
      }
    });
  }
  return { paths, other };
}

// Straight to a neighbour; around what is in between.
function arc([x1, y1], [x2, y2], axis) {
  const far = Math.hypot(x2 - x1, y2 - y1);
  const bend = far > 60 ? 7 + 2 * axis : 2.5 * (axis % 2 ? 1 : -1);
  const [mx, my] = [(x1 + x2) / 2 - ((y2 - y1) / far) * bend, (y1 + y2) / 2 + ((x2 - x1) / far) * bend];
  return `M${x1.toFixed(1)} ${y1.toFixed(1)}Q${mx.toFixed(1)} ${my.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`;
}

function torusWires(side, wiring, paths, other) {
  const { sizes, wraps, local } = side.hardware;
  const place = new Map();
  wiring.cells.forEach((one, d) => { if (!one.core) place.set(`${one.box}/${one.place}`, d); });
  const stub = wiring.gap * 0.9;
  for (const [, d] of place) {
    const { box, place: at } = wiring.cells[d];
    const [x, y] = middleOf(wiring, d);
    for (let dim = 0; dim < 3; dim++) {
      if (sizes[dim] < 2) continue;
      const to = [...at];
      to[dim] = (at[dim] + 1) % sizes[dim];
      const wrap = to[dim] === 0;
      if (wrap && (!wraps[dim] || sizes[dim] < 3)) continue;
      const next = place.get(`${box}/${to}`);
      const into = axisBetween(side, d % local, next % local);
      const list = into === null ? other : paths[into];
      const [nx, ny] = middleOf(wiring, next);
      const half = wiring.cell / 2;
      if (dim === 2) {
        // To the plane behind it, and to the one before.
        list.push(`M${x + half * 0.7} ${y - half * 0.7}l${stub} ${-stub}`);
        if (!wrap || wraps[2]) list.push(`M${nx - half * 0.7} ${ny + half * 0.7}l${-stub} ${stub}`);
      } else if (wrap) {
        list.push(dim === 0 ? `M${x + half} ${y}h${stub}M${nx - half} ${ny}h${-stub}` : `M${x} ${y + half}v${stub}M${nx} ${ny - half}v${-stub}`);
      } else list.push(`M${x} ${y}L${nx} ${ny}`);
    }
  }
}

// The only axis in which two devices differ, or null.
function axisBetween(side, one, two) {
  const [a, b] = [coordinates(side, one), coordinates(side, two)];
  const differ = a.map((at, i) => (at !== b[i] ? i : -1)).filter((i) => i >= 0);
  return differ.length === 1 ? differ[0] : null;
}

// For each axis that leaves the boxes: a line below each row of them, and down from each box.
function trunkWires(wiring) {
  return wiring.crossing.map((one, lane) => {
    const path = [];
    const rows = Math.ceil(wiring.boxes.length / wiring.across);
    const y = (row) => wiring.boxes[row * wiring.across].y + wiring.boxes[0].height + 10 + lane * wiring.lane;
    const x = (box) => box.x + box.width / 2 + (lane - (wiring.crossing.length - 1) / 2) * wiring.lane;
    for (let row = 0; row < rows; row++) {
      const there = wiring.boxes.slice(row * wiring.across, (row + 1) * wiring.across);
      path.push(`M${x(there[0])} ${y(row)}H${Math.max(x(there[there.length - 1]), x(there[0]))}`);
      for (const box of there) path.push(`M${x(box)} ${box.y + box.height}V${y(row)}`);
    }
    // Rows are joined at their left.
    if (rows > 1) for (let row = 0; row < rows; row++) path.push(`M${x(wiring.boxes[0])} ${y(row)}H${-4 - lane * 3}`);
    if (rows > 1) path.push(`M${-4 - lane * 3} ${y(0)}V${y(rows - 1)}`);
    return { axis: one.axes[0], d: path.join("") };
  });
}

// --- the picture -----------------------------------------------------------------------------------

// `pick(device)` is called with the first device of a cell that is chosen.
class Wiring {
  constructor(side, { pick, label }) {
    Object.assign(this, { side, pick, chosen: 0, lit: null });
    this.space = make("div", { class: "wiring-space", role: "grid", "aria-label": label });
    this.element = make("div", { class: "wiring" }, this.space);
    this.space.addEventListener("keydown", (event) => this.key(event));
    let width = 0;
    new ResizeObserver(() => {
      if (this.element.clientWidth && this.element.clientWidth !== width) { width = this.element.clientWidth; this.draw(); }
    }).observe(this.element);
    this.draw();
  }

  draw() {
    const { side } = this;
    const wiring = wiringOf(side, this.element.clientWidth || 760);
    this.wiring = wiring;
    const indent = wiring.boxes.length > wiring.across && wiring.crossing.length ? 8 + wiring.crossing.length * 3 : 0;
    Object.assign(this.space.style, { width: `${wiring.width}px`, height: `${wiring.height}px`, marginLeft: `${indent}px` });
    const { kind } = side.hardware;
    const words = { gpu: "host", tpu: "slice", cpu: "host", none: "mesh" };
    const boxes = wiring.boxes.map((box, i) => make("div", {
      class: "wiring-box", "aria-hidden": true, style: `left:${box.x}px;top:${box.y}px;width:${box.width}px;height:${box.height}px`,
    }, make("span", { class: "wiring-name" }, wiring.each ? `${plural(wiring.each, "device")} a cell` : `${words[kind] || "host"}${wiring.boxes.length > 1 ? ` ${i}` : ""}${kind === "gpu" && wiring.boxes.length < 33 ? " · NVLink" : ""}`)));
    const { paths, other } = insideWires(side, wiring);
    const thin = side.devices > 64 ? " thin" : "";
    this.wires = paths.map((path, axis) => (path.length ? make("path", { class: `wire${thin}`, "data-axis": axis, style: `--c:var(--axis${axis % 6})`, d: path.join("") }) : null));
    const trunks = trunkWires(wiring).map(({ axis, d }) => make("path", { class: "wire trunk", "data-axis": axis, style: `--c:var(--axis${axis % 6})`, d }));
    this.all = [...this.wires.filter(Boolean), ...trunks];
    const grey = other.length ? [make("path", { class: `wire${thin}`, style: "--c:var(--faint)", d: other.join("") })] : [];
    const svg = make("svg", { width: wiring.width, height: wiring.height, role: "img", "aria-label": "Links between devices, coloured by axis" }, grey, this.all);
    this.cells = wiring.cells.map((one, i) => make("button", {
      type: "button", role: "gridcell", class: "device", tabindex: -1, "data-device": one.devices[0],
      style: `left:${wiring.at[i].x}px;top:${wiring.at[i].y}px;width:${one.core === undefined || side.hardware.cores < 2 ? wiring.cell : wiring.cell * 0.8}px;height:${wiring.cell}px`,
      onclick: () => this.pick(one.devices[0]),
    }));
    // A grid's cells are in rows.
    this.space.replaceChildren(...boxes, svg, make("div", { role: "row", style: "display:contents" }, this.cells));
    this.show(this.chosen, this.lit);
  }

  cellOf(device) { return this.wiring.each ? Math.floor(device / this.wiring.each) : device; }

  // Shows which device is chosen, and lights the links and the groups of an axis, or of several.
  show(chosen, lit) {
    const { side, wiring } = this;
    Object.assign(this, { chosen, lit });
    const at = this.cellOf(chosen);
    const mates = new Map();
    const talking = lit ? [lit] : axisTraffic(side).filter((one) => one.axes.length === 1);
    for (const one of talking) for (const device of groupOfAxes(side, chosen, one.axes)) mates.set(this.cellOf(device), one.colour);
    const groups = new Map();
    this.cells.forEach((cell, i) => {
      const device = wiring.cells[i].devices[0];
      const several = wiring.cells[i].devices.length > 1;
      cell.textContent = side.devices > 64 || several ? "" : device;
      const title = several ? `devices ${device} to ${device + wiring.cells[i].devices.length - 1}` : `${showDevice(side, device)}, device ${device}${side.hardware.boxes > 1 ? `, ${side.hardware.kind === "tpu" ? "slice" : "host"} ${boxOf(side, device)}` : ""}`;
      cell.title = title;
      cell.setAttribute("aria-label", title);
      cell.setAttribute("aria-selected", i === at);
      cell.tabIndex = i === at ? 0 : -1;
      cell.classList.toggle("mate", mates.has(i) && i !== at && mates.size < this.cells.length);
      cell.style.setProperty("--mate", mates.get(i) || "");
      let fill = "";
      if (lit) {
        const first = firstOfGroup(side, device, lit.axes);
        if (!groups.has(first)) groups.set(first, groups.size);
        fill = `color-mix(in oklab, hsl(${(groups.get(first) * 137.5) % 360} 65% 55%) 42%, var(--cell, #dfe5ea))`;
      }
      cell.style.background = i === at ? "" : fill;
    });
    for (const wire of this.all) {
      const mine = lit && lit.axes.includes(Number(wire.dataset.axis));
      wire.classList.toggle("lit", Boolean(mine));
      wire.classList.toggle("unlit", Boolean(lit) && !mine);
    }
  }

  // The nearest cell in the direction of an arrow.
  key(event) {
    const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (!way) return;
    event.preventDefault();
    const from = this.wiring.at[this.cellOf(this.chosen)];
    let best = null;
    this.wiring.at.forEach(({ x, y }, i) => {
      const [dx, dy] = [x - from.x, y - from.y];
      const along = dx * way[0] + dy * way[1];
      const aside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
      if (along <= 0.5) return;
      const cost = along + 3 * aside;
      if (!best || cost < best[0]) best = [cost, i];
    });
    if (!best) return;
    this.pick(this.wiring.cells[best[1]].devices[0]);
    this.cells[best[1]].focus();
  }
}
