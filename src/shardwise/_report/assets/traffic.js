// Collectives: by axis, by source line, or one by one; sorted by the bytes that a device sends.

const COLLECTIVE = ["kind", "axes", "shape", "times", "bytes", "place", "module", "leaf", "op", "backward", "hosts"];

function collectivesOf(side) {
  if (!side.compiled) return [];
  return side.compiled.collectives.map((row) => Object.fromEntries(COLLECTIVE.map((field, i) => [field, row[i]])));
}

function summed(rows, keyOf) {
  const found = new Map();
  for (const row of rows) {
    const key = keyOf(row);
    const sum = found.get(key) || { ...row, key, times: 0, bytes: 0 };
    sum.times += row.times;
    sum.bytes += row.bytes;
    found.set(key, sum);
  }
  return [...found.values()].sort((a, b) => b.bytes - a.bytes);
}

const over = (row) => row.axes.join(", ") || "no axis";
const lineOf = (row) => row.place || "unknown line";
// Which collectives leave a host, or a slice: said wherever there are several.
const hasReach = (rows) => rows.some((row) => row.hosts > 1);

const TRAFFIC_VIEWS = {
  "by axis": {
    header: ["over", "kind", "reach", "times", "bytes", ""],
    rows: (rows, reach) => summed(rows, (row) => `${over(row)}|${row.kind}|${row.hosts}`).map((row) => [over(row), row.kind, reach(row), row]),
  },
  "by line": {
    header: ["line", "module", "kind", "over", "reach", "times", "bytes", ""],
    rows: (rows, reach) => summed(rows, (row) => [row.place, row.module, row.kind, over(row), row.hosts].join("|"))
      .map((row) => [lineOf(row), row.module, row.kind, over(row), reach(row), row]),
  },
  each: {
    header: ["kind", "over", "reach", "shape", "pass", "leaf or op", "module", "line", "times", "bytes", ""],
    rows: (rows, reach) => summed(rows, (row) => [row.kind, row.axes, row.hosts, row.shape, row.backward, row.leaf, row.op, row.module, row.place].join("|"))
      .map((row) => [row.kind, over(row), reach(row), row.shape, row.backward ? "backward" : "forward", row.leaf || short(row.op), row.module, lineOf(row), row]),
  },
};

function showTraffic(element, side) {
  const title = make("h2", { id: "traffic-title" }, "Collectives");
  if (!side.compiled) {
    element.replaceChildren(title, make("p", { class: "faint" }, "Not compiled: only the compiler knows which collectives it inserts."));
    return;
  }
  const rows = collectivesOf(side);
  const total = rows.reduce((sum, row) => sum + row.bytes, 0);
  const summary = rows.length
    ? `${plural(rows.reduce((n, row) => n + row.times, 0), "collective")} in a step (compiled); each device sends ${showBytes(total)} (modelled)`
    : side.compiled.flops === null ? "The collectives are unknown: the compiler returned no program." : "The compiled step has no collectives.";
  const missing = Object.entries(side.compiled.not_counted).map(([name, times]) => times > 1 ? `${name} ×${times}` : name).join(", ");
  const work = side.compiled.flops === null ? "" : `${showFlops(side.compiled.flops)} and ${showBytes(side.compiled.bytes_accessed)} of memory traffic on each device in a step (compiled)${missing && `; flops not counted: ${missing}`}`;
  const place = make("div", {});
  const show = (name) => {
    const { header: full, rows: rowsOf } = TRAFFIC_VIEWS[name];
    const at = full.indexOf("reach");
    const withReach = (list) => (hasReach(rows) ? list : list.filter((_, i) => i !== at));
    const header = withReach(full);
    const reach = (row) => (row.hosts > 1 ? make("span", { class: "crossing" }, reachOf(side, row)) : reachOf(side, row));
    const shown = rowsOf(rows, reach).map(withReach);
    const most = Math.max(1, ...shown.map((row) => row[row.length - 1].bytes));
    const cells = shown.slice(0, 500).map((row) => {
      const sum = row[row.length - 1];
      const bar = make("span", { class: "bar wide", "aria-hidden": true }, make("span", { style: `width:${(100 * sum.bytes) / most}%;--c:var(--cut0)` }));
      return [...row.slice(0, -1), `×${sum.times.toLocaleString("en")}`, showBytes(sum.bytes), bar];
    });
    place.replaceChildren(table(header, cells, { right: [header.length - 3, header.length - 2], label: `Collectives ${name}` }),
      shown.length > 500 ? make("p", { class: "faint" }, `and ${shown.length - 500} more`) : "");
  };
  const views = Object.keys(TRAFFIC_VIEWS).map((name) => [name, () => show(name)]);
  element.replaceChildren(title, make("p", {}, summary), make("p", {}, work),
    side.compiled.note ? make("p", { class: "faint" }, side.compiled.note) : "",
    rows.length ? tabList("traffic", "Collectives", views) : "", place);
}
