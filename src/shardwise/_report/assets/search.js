// The page of a search: the plot and the table choose a layout, whose details are below.

const found = JSON.parse(byId("data").textContent);
const PARTS = { compute: "--cut0", memory: "--cut1", communication: "--cut2", launch: "--launch", unknown: "--cut3" };
const colours = new Map([...new Set([...found.candidates, ...found.remedies].map((c) => c.strategy))].map((name, i) => [name, `--cut${i % 6}`]));
let plot = null;

function tableOf(candidates, number, chips = false) {
  const several = chips || new Set(candidates.map((c) => c.chips)).size > 1;
  const priced = candidates.some((c) => c.cost !== null);
  const split = candidates.some((c) => c.accumulate > 1);
  const proved = candidates.some((c) => !c.fits || c.label === "compiled");
  const status = (c) => make("span", { class: c.fits ? "" : "bad-text" }, c.fits ? (c.label === "compiled" ? "compiled" : "") : "does not fit");
  const columns = [
    ["", (c, i) => number(i)],
    ["mesh", (c) => c.axes],
    ["strategy", (c) => make("span", {}, make("span", { class: "swatch", style: `--c:var(${colours.get(c.strategy)})` }), c.strategy)],
    ["step", (c) => showSeconds(c.seconds)],
    ["peak", (c) => showBytes(c.peak_bytes)],
    ...(proved ? [["", status]] : []),
    ["remat", (c) => showRemat(c.remat)],
    ...(split ? [["microbatches", (c) => c.accumulate]] : []),
    ...(candidates.some((c) => c.loss_chunks > 1) ? [["chunks", (c) => c.loss_chunks]] : []),
    ...(candidates.some((c) => c.offload) ? [["offload", (c) => c.offload || "none"]] : []),
    ...(candidates.some((c) => c.microbatches) ? [["stages' parts", (c) => c.microbatches || ""]] : []),
    ...(new Set(candidates.map((c) => c.samples)).size > 1 ? [["batch", (c) => c.samples]] : []),
    ["MFU", (c) => `${(100 * c.mfu).toFixed(0)}%`],
    ...(priced ? [["cost of a step", (c) => (c.cost === null ? "" : showCost(c.cost))]] : []),
    ...(several ? [["chips", (c) => c.chips]] : []),
  ];
  const right = columns.map(([name], i) => (i === 0 || ["step", "peak", "microbatches", "chunks", "stages' parts", "batch", "MFU", "cost of a step"].includes(name) ? i : -1));
  return table(columns.map(([name]) => name), candidates.map((c, i) => columns.map(([, cell]) => cell(c, i))),
    { right, label: "Layouts, those that fit first, fastest first" });
}

function showFound() {
  const { candidates } = found;
  const title = make("h2", { id: "found-title" }, `${plural(candidates.length, "layout")}, by time and memory`);
  const drawn = make("div");
  const number = (i) => make("button", {
    type: "button", class: "link", "aria-label": `Show layout ${i + 1}`, onclick: () => pick(i),
  }, `${i + 1}`);
  const listed = tableOf(candidates, number);
  listed.id = "candidates";
  listed.querySelectorAll("tbody tr").forEach((row, i) => row.addEventListener("click", () => pick(i)));
  byId("found").replaceChildren(title, make("div", { class: "columns" }, make("div", {}, drawn, marks(candidates)), listed));
  plot = new Front(drawn, found, colours, pick);
}

function marks(candidates) {
  const sample = (candidate) => make("svg", { viewBox: "0 0 12 12", "aria-hidden": true, "aria-label": "mark" },
    make("g", { class: "point", style: "--c:var(--faint)" }, markOf(candidate, 6, 6)));
  const names = [...new Set(candidates.map((c) => c.strategy))];
  const entries = names.map((name) => make("span", {}, make("span", { class: "swatch", style: `--c:var(${colours.get(name)})` }), name));
  if (candidates.some((c) => !c.fits)) entries.push(make("span", {}, sample({ fits: false, label: "" }), "does not fit"));
  if (candidates.some((c) => c.label === "compiled")) entries.push(make("span", {}, sample({ fits: true, label: "compiled" }), "compiled; the others are modelled"));
  if (found.front.length > 1) entries.push(make("span", {}, "the line joins the layouts that no other beats in both"));
  return make("div", { class: "marks" }, entries);
}

function pick(number) {
  plot.choose(number);
  byId("candidates").querySelectorAll("tbody tr").forEach((row, i) => {
    row.classList.toggle("picked", i === number);
    if (i === number) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
  });
  showChosen(found.candidates[number], number);
}

function showChosen(candidate, number) {
  const titles = [["best", "the fastest"], ["smallest", "the smallest"], ["cheapest", "the cheapest"]];
  const is = titles.filter(([name]) => found[name] === number).map(([, text]) => text).join(", ");
  const total = Object.values(candidate.parts).reduce((a, b) => a + b, 0) || 1;
  const pieces = Object.entries(candidate.parts).filter(([, seconds]) => seconds > 0);
  const bar = make("div", {
    class: "memory parts", role: "img",
    "aria-label": `Time of a step: ${pieces.map(([name, s]) => `${name} ${showSeconds(s)}`).join(", ")}.`,
  }, pieces.map(([name, seconds]) => make("span", {
    class: "piece", title: `${name}: ${showSeconds(seconds)}`,
    style: `width:${(100 * seconds) / total}%;background:var(${PARTS[name] || "--cut3"})`,
  }, make("span", { class: "piece-name" }, name))));
  const facts = [
    ["step", `${showSeconds(candidate.seconds)} (${candidate.label}; the estimate is ${showSeconds(candidate.low)} to ${showSeconds(candidate.high)})`],
    ["parts", pieces.map(([name, s]) => `${name} ${showSeconds(s)}`).join(", ")],
    ["peak memory", `${showBytes(candidate.peak_bytes)} of ${showBytes(candidate.capacity_bytes)} (${candidate.label})${candidate.fits ? "" : ": does not fit"}`],
    ["parameters, optimizer and batch", `${showBytes(candidate.state_bytes)} (exact)`],
    ...Object.entries(candidate.sent).map(([axes, sent]) => [`sent over ${axes}`, `${showBytes(sent)} by each device (modelled)`]),
    ...(candidate.tokens_per_second ? [["tokens per second", Math.round(candidate.tokens_per_second).toLocaleString("en")]] : []),
    ...(candidate.cost === null ? [] : [["cost of a step", showCost(candidate.cost)]]),
  ];
  byId("chosen").replaceChildren(
    make("h2", { id: "chosen-title" }, `${number + 1}: ${candidate.axes} ${candidate.strategy} on ${candidate.chips}, ${showStep(candidate)}${is ? ` (${is})` : ""}`),
    make("div", { class: "columns" },
      make("div", {}, bar, make("div", { class: "slice-box" }, make("dl", {}, facts.map(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]).flat())),
        make("code", { class: "command" }, candidate.command)),
      candidate.why ? make("div", {}, make("h3", {}, "Against the fastest"), make("div", { class: "why" }, candidate.why)) : null));
}

const { verdict } = found;
byId("top").replaceChildren(
  make("div", {}, make("h1", {}, found.title), make("p", { class: "faint" }, `Shardwise ${found.version}`)), themeButton(() => plot && plot.draw()));
byId("verdict").replaceChildren(make("div", { class: `verdict ${verdict.state}` },
  make("span", { class: "mark", "aria-hidden": true }, { good: "✓", bad: "✗" }[verdict.state] || "?"), make("span", {}, verdict.text)));
if (found.candidates.length) {
  showFound();
  pick(found.best === null ? found.smallest : found.best);
}
if (found.remedies.length) {
  byId("remedies").replaceChildren(make("h2", { id: "remedies-title" }, "What would fit"), tableOf(found.remedies, (i) => `${i + 1}`, true));
}
const notes = [...found.notes, ...(found.stopped ? [`stopped early: ${found.stopped}`] : [])];
if (notes.length) {
  byId("notes").replaceChildren(make("h2", { id: "notes-title" }, "Notes"), make("ul", {}, notes.map((note) => make("li", {}, note))));
}
byId("foot").replaceChildren(make("p", {},
  "exact: arithmetic on shapes. compiled: reported by the chips' own compiler. modelled: an estimate. Everything is in this file; nothing is loaded."));
