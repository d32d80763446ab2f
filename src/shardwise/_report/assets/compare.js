// Two sides compared: what changed and whether it is better, then leaves, collectives and findings.

const LETTERS = ["A", "B"];
const letter = (side) => make("span", { class: `letter side${side.number}` }, LETTERS[side.number]);

const signed = (bytes) => `${bytes > 0 ? "+" : bytes < 0 ? "−" : ""}${showBytes(Math.abs(bytes))}`;
const signedSeconds = (seconds) => `${seconds > 0 ? "+" : seconds < 0 ? "−" : ""}${showSeconds(Math.abs(seconds))}`;
const signedShare = (ratio) => (Math.abs(ratio) < 0.0005 ? "±0%" : `${ratio > 0 ? "+" : "−"}${(100 * Math.abs(ratio)).toFixed(Math.abs(ratio) < 0.1 ? 1 : 0)}%`);

// The figures that both have: a name, both amounts, how they are shown, whether less is better, their label.
function figuresOfBoth(one, two) {
  const compiled = one.memory.whole && two.memory.whole;
  const kept = (side) => side.memory.parts.filter(([, , label]) => compiled || label === "exact").filter(([name]) => compiled || [one, two].every((s) => s.memory.parts.some((part) => part[0] === name)));
  const sum = (side) => kept(side).reduce((n, [, bytes]) => n + bytes, 0);
  const names = kept(one).map(([name]) => name);
  const rows = [{ id: "memory", name: compiled ? "peak memory" : listed(names) || "memory", a: sum(one), b: sum(two), show: showBytes, change: signed, less: true, label: compiled ? "compiled" : "exact" }];
  if (one.time && two.time) {
    rows.push({ id: "time", name: "step", a: one.time.seconds, b: two.time.seconds, show: showSeconds, change: signedSeconds, less: true, label: "modelled" });
    const rate = (side) => side.time.tokens_per_second;
    const count = (n) => Math.round(n).toLocaleString("en");
    if (rate(one) && rate(two)) rows.push({ id: "rate", name: "tokens/s", a: rate(one), b: rate(two), show: count, change: (n) => `${n < 0 ? "−" : "+"}${count(Math.abs(n))}`, less: false, label: "modelled" });
  }
  if (one.compiled && two.compiled && one.compiled.flops !== null && two.compiled.flops !== null) {
    const sent = (side) => collectivesOf(side).reduce((n, row) => n + row.bytes, 0);
    rows.push({ id: "traffic", name: "sent by each device", a: sent(one), b: sent(two), show: showBytes, change: signed, less: true, label: "modelled" });
  }
  const wrong = (side) => findingCount(side, "error") + findingCount(side, "warning");
  rows.push({ id: "findings", name: "findings", a: wrong(one), b: wrong(two), show: String, change: (n) => (n > 0 ? `+${n}` : n < 0 ? `−${-n}` : "0"), less: true, label: compiled ? "compiled" : "exact" });
  return rows;
}

// Better, worse, or the same; a change of less than a thousandth is none.
function judged({ a, b, less }) {
  if (Math.abs(b - a) <= 0.0005 * Math.max(Math.abs(a), Math.abs(b))) return "the same";
  return b < a === less ? "better" : "worse";
}

const fitWord = ({ summary, memory }) => (summary.errors || summary.problem ? "cannot run" : summary.fits === true ? "fits" : summary.fits === false ? "does not fit" : memory.capacity ? "not known" : "no limit known");

function compareCard(row, title, lines, go) {
  const word = judged(row);
  const big = word === "the same" ? "The same" : row.a && row.id !== "findings" ? signedShare(row.b / row.a - 1) : row.change(row.b - row.a);
  return card(`compare-${row.id}`, title, {
    state: word === "better" ? "good" : word === "worse" ? "warn" : "plain", tag: labelOf(row.label), big,
    unit: word === "the same" ? "" : make("b", { class: word }, word),
    second: make("span", { class: "from-to" }, make("span", { class: "letter side0" }, "A"), ` ${row.show(row.a)} `, make("span", { class: "letter side1" }, "B"), ` ${row.show(row.b)}`), lines,
  });
}

// Fills the page of differences; returns its sections for the list at the side.
function showDifferences(element, sides, { leaf, view }) {
  const [one, two] = sides;
  const rows = figuresOfBoth(one, two);
  const row = (id) => rows.find((one) => one.id === id);
  const missing = (id, title, why) => card(`compare-${id}`, title, { big: "Not known", lines: [why] });
  const unknown = (what) => `${what} is known of ${one.compiled && !two.compiled ? "A alone: B is" : two.compiled && !one.compiled ? "B alone: A is" : "neither: they are"} not compiled${one.compiled && two.compiled ? " for GPUs or TPUs" : ""}.`;
  const cards = [
    compareCard(row("memory"), "Memory of one device", [one.memory.whole === two.memory.whole ? `${row("memory").name}; A: ${fitWord(one)}, B: ${fitWord(two)}` : `Only ${row("memory").name}, since one is not compiled.`]),
    row("time") ? compareCard(row("time"), "Time of one step", [`${signedSeconds(two.time.seconds - one.time.seconds)}; A is bound by ${one.time.bound}, B by ${two.time.bound}`]) : missing("time", "Time of one step", unknown("The time of a step")),
    row("traffic") ? compareCard(row("traffic"), "Traffic", [`${signed(row("traffic").b - row("traffic").a)} sent by each device in a step`]) : missing("traffic", "Traffic", unknown("What devices send")),
    compareCard(row("findings"), "Findings", [`A: ${findingsTitle(one).replace("Findings: ", "").toLowerCase()}; B: ${findingsTitle(two).replace("Findings: ", "").toLowerCase()}`]),
  ];
  const section = (id, name, ...inner) => ({ id, name, inner: inner.filter(Boolean) });
  const found = [
    section("compared", "What changed", make("h2", { id: "compared-title" }, "What changed, from A to B"), sidesList(sides, view), make("div", { class: "cards" }, cards),
      make("div", { class: "columns" }, figureTable(one, two, rows), setupDifferences(one, two))),
    section("compared-memory", "Memory", make("h2", {}, "Memory of one device"), memoryDifferences(one, two)),
    section("compared-time", "Time", timeDifferences(one, two)),
    section("compared-leaves", "Leaves", leafDifferences(one, two, leaf)),
    section("compared-traffic", "Collectives", trafficDifferences(one, two)),
    section("compared-findings", "Findings", findingDifferences(one, two)),
    section("compared-maps", "Maps", make("h2", {}, "Bytes on each device, by leaf ", labelOf("exact")), mapsOf(sides)),
  ].filter(({ inner }) => inner.length);
  element.replaceChildren(...found.map(({ id, inner }) => make("section", { id }, inner)));
  drawMaps(element, sides, leaf);
  return found.map(({ id, name }) => [id, name]);
}

function sidesList(sides, view) {
  return make("ul", { class: "sides-list" }, sides.map((side) => make("li", {}, letter(side), " ",
    make("button", { type: "button", class: "link", onclick: () => view(side.number) }, side.name), make("span", { class: "faint" }, ` ${side.verdict.text.split("\n")[0]}`))));
}

function setupDifferences(one, two) {
  const axes = (side) => side.mesh.map(([name, size]) => `${name}=${size}`).join(",");
  const rows = [["mesh", axes(one), axes(two)], ["devices", `${one.devices}`, `${two.devices}`], ["chips", one.chips || "none", two.chips || "none"],
    ["parameters", showBytes(one.tree.bytes), showBytes(two.tree.bytes)], ["leaves", `${one.leaves.length}`, `${two.leaves.length}`]].filter(([, a, b]) => a !== b);
  return make("div", {}, make("h3", {}, "What they are"), rows.length ? table(["", "A", "B"], rows, { label: "Setups compared" }) : make("p", { class: "faint" }, "The same model, mesh and chips."));
}

function figureTable(one, two, rows) {
  const change = (row) => make("span", { class: judged(row).replace(" ", "-") }, judged(row) === "the same" ? "the same" : `${row.change(row.b - row.a)} ${judged(row)}`);
  return make("div", {}, make("h3", {}, "Figures"), table(["", "A", "B", "change"],
    [["does it fit", fitWord(one), fitWord(two), ""], ...rows.map((row) => [make("span", {}, row.name, " ", labelOf(row.label)), row.show(row.a), row.show(row.b), change(row)])],
    { right: [1, 2, 3], label: "Figures compared" }));
}

function memoryDifferences(one, two) {
  const most = Math.max(...[one, two].map((side) => Math.max(side.memory.capacity || 0, usedBytes(side)))) || 1;
  const bars = [one, two].map((side) => make("div", { class: "pair-row" }, letter(side), memoryStack(side, most), make("span", { class: "right" }, showBytes(usedBytes(side)))));
  const names = [...new Set([one, two].flatMap((side) => side.memory.parts.map(([name]) => name)))];
  const of = (side, name) => side.memory.parts.find((part) => part[0] === name);
  const rows = names.map((name) => {
    const [a, b] = [of(one, name), of(two, name)];
    return [make("span", {}, make("span", { class: "swatch", style: `--c:var(${PART_COLOURS[name] || "--cut4"})` }), name), a ? showBytes(a[1]) : "not known", b ? showBytes(b[1]) : "not known", a && b ? signed(b[1] - a[1]) : "", (a || b)[2]];
  });
  return make("div", { class: "columns" }, make("div", { class: "pair" }, bars), table(["", "A", "B", "change", ""], rows, { right: [1, 2, 3], label: "Memory compared" }));
}

function timeDifferences(one, two) {
  if (!one.time || !two.time) return null;
  const names = Object.keys(BOUND_COLOURS).filter((name) => one.time.parts[name] || two.time.parts[name]);
  const row = (name, a, b) => [name, showSeconds(a), showSeconds(b), signedSeconds(b - a)];
  const swatch = (name) => make("span", {}, make("span", { class: "swatch", style: `--c:var(${BOUND_COLOURS[name]})` }), name);
  const rows = names.map((name) => row(swatch(name), one.time.parts[name] || 0, two.time.parts[name] || 0));
  rows.push(row(make("b", {}, "step"), one.time.seconds, two.time.seconds));
  const most = Math.max(one.time.seconds, two.time.seconds) || 1;
  const bars = [one, two].map((side) => make("div", { class: "pair-row" }, letter(side), timeStrip(side.time, most), make("span", { class: "right" }, showSeconds(side.time.seconds))));
  return make("div", {}, make("h2", {}, "Time of one step ", labelOf("modelled")),
    make("div", { class: "columns" }, make("div", { class: "pair" }, bars, make("p", {}, letter(one), ` ${one.time.verdict}`), make("p", {}, letter(two), ` ${two.time.verdict}`)),
      table(["", "A", "B", "change"], rows, { right: [1, 2, 3], label: "Time compared" })));
}

function leafDifferences(one, two, pick) {
  if (!one.leaves.length || !two.leaves.length) return null;
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
  const title = (text) => make("h2", {}, text);
  const change = ({ a, b, paths }) => ((b ? b.held : 0) - (a ? a.held : 0)) * paths.length;
  const groups = [...found.values()].sort((x, y) => Math.abs(change(y)) - Math.abs(change(x)));
  if (!groups.length) return make("div", {}, title("Leaves"), make("p", {}, "Every leaf has the same spec and bytes in both."));
  const show = (side, leaf) => (leaf ? make("code", {}, specText(side, leaf.spec)) : "absent");
  const count = groups.reduce((n, group) => n + group.paths.length, 0);
  return make("div", {}, title(`Leaves that differ: ${count.toLocaleString("en")}`),
    table(["leaf", "A", "B", "bytes in A", "bytes in B", "change"], groups.slice(0, 400).map((group) => {
      const { a, b, paths } = group;
      const name = paths.length > 1 ? `${numberless(paths[0])} ×${paths.length}` : paths[0];
      const link = make("button", { type: "button", class: "link", title: `Show ${paths[0]}`, onclick: () => pick(a ? one : two, a || b) }, name);
      const held = (leaf) => showBytes((leaf ? leaf.held : 0) * paths.length);
      return [link, show(one, a), show(two, b), held(a), held(b), change(group) ? signed(change(group)) : "the same"];
    }), { right: [3, 4, 5], label: "Leaves that differ" }),
    groups.length > 400 ? make("p", { class: "faint" }, `and ${plural(groups.length - 400, "more group")}`) : "");
}

function trafficDifferences(one, two) {
  if (!one.compiled || !two.compiled) return null;
  const sums = [one, two].map((side) => new Map(summed(collectivesOf(side), (row) => `${row.kind} over ${over(row)}`).map((row) => [row.key, row])));
  const keys = [...new Set([...sums[0].keys(), ...sums[1].keys()])];
  const of = (i, key, field) => (sums[i].get(key) ? sums[i].get(key)[field] : 0);
  const change = (key) => of(1, key, "bytes") - of(0, key, "bytes");
  const times = (i, key) => (of(i, key, "times") ? `×${of(i, key, "times").toLocaleString("en")}` : "none");
  const rows = keys.sort((x, y) => Math.abs(change(y)) - Math.abs(change(x))).map((key) => [
    key, times(0, key), times(1, key), showBytes(of(0, key, "bytes")), showBytes(of(1, key, "bytes")),
    !of(0, key, "times") ? `${signed(change(key))}, added` : !of(1, key, "times") ? `${signed(change(key))}, removed` : change(key) ? signed(change(key)) : "the same",
  ]);
  return make("div", {}, make("h2", {}, "Collectives in a step"), rows.length
    ? table(["", "in A", "in B", "sent in A", "sent in B", "change"], rows, { right: [1, 2, 3, 4, 5], label: "Collectives compared" }) : make("p", {}, "Neither step has any."));
}

function findingDifferences(one, two) {
  const keys = (side) => new Set(side.findings.map((f) => `${f.code} ${f.name}: ${f.path}`));
  const [a, b] = [keys(one), keys(two)];
  const only = (from, other) => [...from].filter((key) => !other.has(key));
  const lists = [[one, only(a, b)], [two, only(b, a)]].filter(([, found]) => found.length);
  if (!lists.length) return null;
  return make("div", {}, make("h2", {}, "Findings that differ"), lists.map(([side, found]) => make("div", {}, make("h3", {}, `Found only in ${LETTERS[side.number]}`), make("ul", {}, found.map((text) => make("li", {}, text))))));
}

function mapsOf(sides) {
  return make("div", { class: "columns" }, sides.map((side) => make("div", {}, make("h3", {}, letter(side)),
    side.leaves.length ? make("div", { class: "map", "data-side": side.number }) : make("p", { class: "faint" }, "Read from a file, which has no layout."))));
}

function drawMaps(element, sides, leaf) {
  const largest = Math.max(...sides.map((side) => side.tree.held)) || 1;
  for (const side of sides) {
    const box = element.querySelector(`.map[data-side="${side.number}"]`);
    // Both maps have the same scale: the smaller side has the smaller map.
    if (box) new Treemap(box, side, { choose: (view) => leaf(side, view.leaf), scale: Math.max(0.25, side.tree.held / largest), label: `${LETTERS[side.number]}: bytes on each device` });
  }
}
