// The data of the page, prepared: leaves with named fields, sizes as text, and the tree of modules.

const LEAF_FIELDS = [
  "path", "kind", "dtype", "shape", "spec", "cuts", "shard", "bytes", "held", "copies",
  "reason", "trail", "names", "faults",
];

function readSide(raw, number) {
  const side = { ...raw, number };
  side.axes = raw.mesh.map(([axis]) => axis);
  side.sizes = raw.mesh.map(([, size]) => size);
  side.devices = side.sizes.reduce((a, b) => a * b, 1);
  const text = (i) => raw.texts[i];
  side.leaves = raw.leaves.map((row) => {
    const leaf = {};
    LEAF_FIELDS.forEach((field, i) => { leaf[field] = row[i]; });
    for (const field of ["kind", "dtype", "spec", "reason", "names"]) leaf[field] = text(leaf[field]);
    leaf.trail = leaf.trail.map(text);
    leaf.faults = leaf.faults.map(text);
    leaf.group = groupOf(leaf, side);
    return leaf;
  });
  side.groups = groupsOf(side);
  // What is found wrong with each leaf.
  side.flags = new Map();
  for (const finding of raw.findings) {
    for (const path of [finding.path, ...finding.more]) side.flags.set(path, [...(side.flags.get(path) || []), finding]);
  }
  side.tree = buildTree(side.leaves);
  side.timeline = raw.time && raw.time.timeline ? readTimeline(raw.time.timeline) : null;
  return side;
}

// How a leaf is split, as the set of axes that split it: what the legend is made of.
function groupOf(leaf, side) {
  if (leaf.faults.length) return "error";
  const used = new Set(leaf.cuts.flat().filter((axis) => side.sizes[axis] > 1));
  if (!used.size) return side.devices > 1 ? "whole" : "one device";
  return [...used].sort((a, b) => a - b).map((axis) => side.axes[axis]).join(" × ");
}

const axisColour = (axis) => `--axis${axis % 6}`;
// Which axes split the last dim, and which the others: two edges of an area.
const splitting = (leaf, side) => {
  const wide = leaf.cuts.map((axes) => axes.filter((axis) => side.sizes[axis] > 1));
  return { rows: wide.slice(0, -1).flat(), columns: wide.slice(-1).flat() };
};

function groupsOf(side) {
  const found = new Map();
  for (const leaf of side.leaves) {
    const axes = leaf.faults.length ? [] : [...new Set(leaf.cuts.flat())].filter((axis) => side.sizes[axis] > 1).sort((a, b) => a - b);
    const group = found.get(leaf.group) || { name: leaf.group, held: 0, count: 0, axes };
    group.held += leaf.held;
    group.count += 1;
    found.set(leaf.group, group);
  }
  for (const group of found.values()) group.paint = paintOf(group);
  const rank = (g) => (g.name === "error" ? 0 : 1);
  return [...found.values()].sort((a, b) => rank(a) - rank(b) || b.held - a.held);
}

// A group's colour as a background: that of its axes, side by side.
function paintOf({ name, axes }) {
  if (!axes.length) return `var(--${name === "error" ? "error" : "whole"})`;
  const part = 100 / axes.length;
  return axes.length === 1 ? `var(${axisColour(axes[0])})`
    : `linear-gradient(90deg, ${axes.map((axis, i) => `var(${axisColour(axis)}) ${i * part}% ${(i + 1) * part}%`).join(", ")})`;
}

const GROUP_NAMES = { whole: "replicated", error: "cannot be split this way", "one device": "on the only device" };
const groupName = (name) => GROUP_NAMES[name] || `split over ${name}`;

function showBytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(count) < 1024) return `${unit === "B" ? count.toFixed(0) : tenths(count)} ${unit}`;
    count /= 1024;
  }
  return `${tenths(count)} TiB`;
}

// As Python rounds: ties go to the even number.
function tenths(count) {
  const [low, rest] = [Math.floor(count * 10), (count * 10) % 1];
  return ((rest === 0.5 ? low + (low % 2) : Math.round(count * 10)) / 10).toFixed(1);
}

const showShape = (dtype, shape) => `${dtype}[${shape.join(",")}]`;
// As the terminal shows it: three digits and a unit, never an exponent.
const showFlops = (count) => {
  const units = ["", "k", "M", "G", "T", "P", "E"];
  let at = 0;
  for (; Math.abs(count) >= 999.5 && at < units.length - 1; at += 1) count /= 1000;
  const digits = Math.abs(count) >= 99.95 ? 0 : Math.abs(count) >= 9.995 ? 1 : 2;
  return `${Number(count.toFixed(digits))} ${units[at]}FLOP`;
};

// In a unit that needs few digits.
function showSeconds(seconds, digits = 3) {
  if (seconds >= 100) return `${Math.floor(Math.round(seconds) / 60)} min ${Math.round(seconds) % 60} s`;
  if (seconds >= 0.9995) return `${seconds.toFixed(Math.max(2, digits - 1))} s`;
  const [count, unit] = seconds >= 0.9995e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "µs"];
  return `${Number(count.toPrecision(Math.max(1, Math.min(digits, 12))))} ${unit}`;
}

const showShare = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0)}%` : "");
const numberless = (path) => path.replace(/(?<=^|\.)\d+(?=\.|$)/g, "#");
const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

// --- the tree: modules down to leaves, layers that repeat folded into one row --------------------

function buildTree(leaves) {
  const root = { name: "", path: "", children: new Map() };
  for (const leaf of leaves) {
    let node = root;
    const keys = leaf.path.split(".");
    keys.forEach((key, depth) => {
      if (!node.children.has(key)) {
        const path = keys.slice(0, depth + 1).join(".");
        node.children.set(key, { name: key, path, children: new Map(), parent: node });
      }
      node = node.children.get(key);
    });
    node.leaf = leaf;
  }
  finish(root);
  return root;
}

function finish(node) {
  node.children = [...node.children.values()];
  node.children.forEach(finish);
  const leaf = node.leaf;
  node.held = leaf ? leaf.held : 0;
  node.bytes = leaf ? leaf.bytes : 0;
  node.count = leaf ? 1 : 0;
  node.groups = new Map(leaf ? [[leaf.group, leaf.held]] : []);
  node.copies = leaf ? leaf.copies : 0;
  for (const child of node.children) {
    node.held += child.held;
    node.bytes += child.bytes;
    node.count += child.count;
    node.copies = Math.max(node.copies, child.copies);
    for (const [group, held] of child.groups) node.groups.set(group, (node.groups.get(group) || 0) + held);
  }
  const inner = node.children.map((child) => `${child.name}:${child.sign}`).join();
  node.sign = leaf ? `${leaf.kind}|${leaf.dtype}|${leaf.shape}|${leaf.spec}` : `(${inner})`;
}

// Returns a node's children, with runs of identical numbered ones folded into one.
function folded(node) {
  if (node.folded) return node.folded;
  const runs = [];
  for (const child of node.children) {
    const run = runs[runs.length - 1];
    const numbered = run && /^\d+$/.test(child.name) && /^\d+$/.test(run[0].name);
    if (numbered && run[0].sign === child.sign) run.push(child);
    else runs.push([child]);
  }
  node.folded = runs.map((run) => (run.length > 1 ? foldNode(run) : run[0]));
  return node.folded;
}

function foldNode(members) {
  const [first] = members;
  const name = `{${first.name}..${members[members.length - 1].name}}`;
  return standIn(first, members, name);
}

// Like `first`, but for all members: its sizes are their sums.
function standIn(first, members, name) {
  const sum = (field) => members.reduce((total, member) => total + member[field], 0);
  const groups = new Map();
  for (const member of members) {
    for (const [group, held] of member.groups) groups.set(group, (groups.get(group) || 0) + held);
  }
  const node = {
    ...first, name, members, groups, held: sum("held"), bytes: sum("bytes"), count: sum("count"), folded: null,
  };
  node.children = first.children.map((child, i) => {
    return standIn(child, members.map((member) => member.children[i]), child.name);
  });
  return node;
}

// --- what is shown of the tree ------------------------------------------------------------------

// A view is a node as a row or an area: modules of a single child are one with it, and repeated
// layers are one where they are folded. `full` is its name from the top: `blocks.{0..31}.up.kernel`.
function rootView(side, fold) {
  side.views ??= new Map();
  if (!side.views.has(fold)) side.views.set(fold, { node: side.tree, label: "", full: "", parent: null, fold });
  return side.views.get(fold);
}

function viewsIn(view) {
  if (view.inner) return view.inner;
  const inside = (node) => (node.leaf ? [] : view.fold ? folded(node) : node.children);
  view.inner = inside(view.node).map((child) => {
    let node = child;
    const names = [child.name];
    for (let only = inside(node); only.length === 1; only = inside(node)) { [node] = only; names.push(node.name); }
    const label = names.join(".");
    return { node, label, full: view.full ? `${view.full}.${label}` : label, parent: view, fold: view.fold, leaf: node.leaf };
  });
  return view.inner;
}

const membersOf = (view) => view.node.members || [view.node];
const leavesIn = (view) => (view.leaf ? membersOf(view).map((member) => member.leaf) : viewsIn(view).flatMap(leavesIn));

// The view that holds a leaf: its own, or that of the layers that it is folded into.
function viewOfLeaf(root, leaf) {
  let view = root;
  while (view && !view.leaf) {
    view = viewsIn(view).find((child) => membersOf(child).some((member) => member.path === leaf.path || leaf.path.startsWith(`${member.path}.`)));
  }
  return view || null;
}

function viewNamed(root, full) {
  let view = root;
  while (view && view.full !== full) view = viewsIn(view).find((child) => full === child.full || full.startsWith(`${child.full}.`));
  return view || null;
}
