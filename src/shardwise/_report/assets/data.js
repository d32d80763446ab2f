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
  side.tree = buildTree(side.leaves);
  side.timeline = raw.time && raw.time.timeline ? readTimeline(raw.time.timeline) : null;
  return side;
}

// How a leaf is split, as the set of axes that split it: what colours stand for.
function groupOf(leaf, side) {
  if (leaf.faults.length) return "error";
  const used = new Set(leaf.cuts.flat().filter((axis) => side.sizes[axis] > 1));
  if (!used.size) return side.devices > 1 ? "whole" : "one device";
  return [...used].sort((a, b) => a - b).map((axis) => side.axes[axis]).join(" × ");
}

function groupsOf(side) {
  const found = new Map();
  for (const leaf of side.leaves) {
    const group = found.get(leaf.group) || { name: leaf.group, held: 0, count: 0 };
    group.held += leaf.held;
    group.count += 1;
    found.set(leaf.group, group);
  }
  const rank = (g) => (g.name === "error" ? 0 : g.name === "whole" ? 1 : 2);
  const groups = [...found.values()].sort((a, b) => rank(a) - rank(b) || b.held - a.held);
  let colour = 0;
  for (const group of groups) {
    group.colour = rank(group) < 2 ? `--${group.name}` : `--cut${colour++ % 6}`;
  }
  return groups;
}

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
  if (seconds >= 100) return `${seconds.toFixed(0)} s`;
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
