// Two sides compared: what changed in leaves, memory, collectives and findings.

function showCompared(element, sides, pickLeaf) {
  const [one, two] = sides;
  element.hidden = false;
  const maps = sides.map((side) => {
    const box = make("div", { class: "map" });
    return make("div", {}, make("h3", {}, side.name), side.leaves.length ? box : make("p", { class: "faint" }, "Read from a file, which has no layout."));
  });
  element.replaceChildren(make("h2", { id: "compared-title" }, `${one.name} against ${two.name}`),
    make("div", { class: "columns" }, maps),
    ...[timeDifferences(one, two), leafDifferences(one, two), trafficDifferences(one, two), findingDifferences(one, two)].filter(Boolean));
  const largest = Math.max(one.tree.held, two.tree.held) || 1;
  sides.forEach((side, i) => {
    const box = maps[i].querySelector(".map");
    // Both maps have the same scale: the smaller side has the smaller map.
    if (box) new Treemap(box, side, { pickLeaf: (leaf) => pickLeaf(side, leaf), scale: Math.max(0.25, side.tree.held / largest), label: `${side.name}, bytes on each device` });
  });
}

const signed = (bytes) => `${bytes > 0 ? "+" : bytes < 0 ? "−" : ""}${showBytes(Math.abs(bytes))}`;
const signedSeconds = (seconds) => `${seconds > 0 ? "+" : seconds < 0 ? "−" : ""}${showSeconds(Math.abs(seconds))}`;

function timeDifferences(one, two) {
  if (!one.time || !two.time) return null;
  const names = Object.keys(BOUND_COLOURS).filter((name) => one.time.parts[name] || two.time.parts[name]);
  const row = (name, a, b) => [name, showSeconds(a), showSeconds(b), signedSeconds(b - a)];
  const rows = names.map((name) => row(name, one.time.parts[name] || 0, two.time.parts[name] || 0));
  rows.push(row(make("b", {}, "step"), one.time.seconds, two.time.seconds));
  const change = (share) => `${share < 0 ? "−" : "+"}${(100 * Math.abs(share)).toFixed(0)}%`;
  const rate = (side) => (side.time.tokens_per_second ? Math.round(side.time.tokens_per_second).toLocaleString("en") : "");
  if (rate(one) && rate(two)) rows.push(["tokens/s", rate(one), rate(two), change(two.time.tokens_per_second / one.time.tokens_per_second - 1)]);
  return make("div", {}, make("h3", {}, "Time of one step (modelled)"),
    table(["", one.name, two.name, "change"], rows, { right: [1, 2, 3], label: "Time compared" }));
}

function leafDifferences(one, two) {
  const before = new Map(one.leaves.map((leaf) => [leaf.path, leaf]));
  const after = new Map(two.leaves.map((leaf) => [leaf.path, leaf]));
  const found = new Map();
  for (const path of new Set([...before.keys(), ...after.keys()])) {
    const [a, b] = [before.get(path), after.get(path)];
    const said = (leaf) => (leaf ? `${leaf.spec} ${showShape(leaf.dtype, leaf.shape)} ${leaf.held}` : "");
    if (said(a) === said(b)) continue;
    const key = [numberless(path), said(a), said(b)].join("|");
    const group = found.get(key) || { a, b, paths: [] };
    group.paths.push(path);
    found.set(key, group);
  }
  if (!one.leaves.length || !two.leaves.length) return null;
  const change = ({ a, b, paths }) => ((b ? b.held : 0) - (a ? a.held : 0)) * paths.length;
  const groups = [...found.values()].sort((x, y) => Math.abs(change(y)) - Math.abs(change(x)));
  if (!groups.length) return make("p", {}, "Every leaf has the same spec and bytes in both.");
  const show = (leaf) => (leaf ? leaf.spec : "absent");
  return make("div", {}, make("h3", {}, `Leaves that differ: ${[...found.values()].reduce((n, g) => n + g.paths.length, 0)}`),
    table(["leaf", one.name, two.name, "bytes/device", "", "change"], groups.slice(0, 400).map((group) => {
      const { a, b, paths } = group;
      const name = paths.length > 1 ? `${numberless(paths[0])} ×${paths.length}` : paths[0];
      return [name, make("code", {}, show(a)), make("code", {}, show(b)), showBytes((a ? a.held : 0) * paths.length), showBytes((b ? b.held : 0) * paths.length), signed(change(group))];
    }), { right: [3, 4, 5], label: "Leaves that differ" }));
}

function trafficDifferences(one, two) {
  if (!one.compiled || !two.compiled) return null;
  const sums = [one, two].map((side) => new Map(summed(collectivesOf(side), (row) => `${row.kind} over ${over(row)}`).map((row) => [row.key, row])));
  const keys = [...new Set([...sums[0].keys(), ...sums[1].keys()])];
  const of = (i, key, field) => (sums[i].get(key) ? sums[i].get(key)[field] : 0);
  const rows = keys.sort((x, y) => of(1, y, "bytes") + of(0, y, "bytes") - of(1, x, "bytes") - of(0, x, "bytes")).map((key) => [
    key, `×${of(0, key, "times")}`, `×${of(1, key, "times")}`, showBytes(of(0, key, "bytes")), showBytes(of(1, key, "bytes")), signed(of(1, key, "bytes") - of(0, key, "bytes")),
  ]);
  return make("div", {}, make("h3", {}, "Collectives in a step"),
    table(["", one.name, two.name, "bytes", "", "change"], rows, { right: [1, 2, 3, 4, 5], label: "Collectives compared" }));
}

function findingDifferences(one, two) {
  const keys = (side) => new Set(side.findings.map((f) => `${f.code} ${f.name}: ${f.path}`));
  const [a, b] = [keys(one), keys(two)];
  const only = (from, other) => [...from].filter((key) => !other.has(key));
  const lists = [[one.name, only(a, b)], [two.name, only(b, a)]].filter(([, found]) => found.length);
  return make("div", {}, lists.map(([name, found]) => make("div", {}, make("h3", {}, `Found only in ${name}`), make("ul", {}, found.map((text) => make("li", {}, text))))));
}
