// Puts the page together, and keeps its parts in step with each other and with the address.

const given = JSON.parse(byId("data").textContent);
const sides = given.sides.map(readSide);
const both = sides.length > 1;
// Which of the two reports is shown; null is the page of differences.
let now = null;
let model = null;
let timeline = null;
let compared = null;
const link = new Link(follow);
const sections = new SideList(byId("side"), { go: (id) => goTo({ at: id }), at: (id) => link.set({ at: id === first() ? "" : id }) });
const first = () => (now ? "summary" : "compared");

// --- to a section, a leaf, or a tab of a section ----------------------------------------------------

function goTo(to) {
  if (to.leaf) {
    const leaf = now && now.leaves.find((one) => one.path === to.leaf);
    if (leaf) model.choose(leaf, "far");
    return;
  }
  if (to.tab) openTab(to.tab);
  if (!to.at) return;
  link.set({ at: to.at === first() ? "" : to.at, ...(to.tab ? { tab: to.tab } : {}) }, true);
  sections.jump(to.at);
}

function openTab(id) {
  const tab = byId(id);
  if (tab && tab.getAttribute("role") === "tab") tab.click();
}

function picked(leaf, members, from, name) {
  showLeaf(byId("leaf"), now, leaf, members, name);
  if (from === "start") return;
  link.set({ leaf: leaf.path });
  if (from !== "far") return;
  link.set({ at: "leaf" }, true);
  sections.jump("leaf");
}

// --- what is shown ------------------------------------------------------------------------------------

function showModel(side) {
  const element = byId("model");
  const title = make("h2", { id: "model-title" }, "The model");
  byId("leaf").hidden = !side.leaves.length;
  model = null;
  if (!side.leaves.length) {
    element.replaceChildren(title, make("p", { class: "faint" }, "This compilation was read from a file, which has no layout: create the report where it is compiled."));
    return;
  }
  const place = make("div", {});
  element.replaceChildren(title, make("p", { class: "faint" },
    "Each area is a leaf, as large as its bytes on one device. Its top edge has the colours of the axes that split its last dim, its left edge those of the other dims; what is grey is replicated."), place);
  const [q, sort, zoom] = ["q", "sort", "zoom"].map((name) => link.get(name));
  const by = link.get("by").split(",").filter((name) => side.groups.some((group) => group.name === name));
  model = new ModelView(place, side, {
    picked, state: { q, by, sort: SORTS.some(([name]) => name === sort) ? sort : "order", zoom, fold: link.get("fold") !== "0" },
    changed: (state) => link.set({ q: state.q, by: state.by.join(","), sort: state.sort === "order" ? "" : state.sort, fold: state.fold ? "" : "0", zoom: state.zoom }),
  });
  // The one that the address names; else the largest.
  const named = side.leaves.find((leaf) => leaf.path === link.get("leaf"));
  if (named) model.choose(named, "start");
  else {
    const largest = side.leaves.reduce((most, leaf) => (leaf.held > most.held ? leaf : most));
    const view = viewOfLeaf(model.root, largest);
    model.chosen = largest;
    model.map.mark();
    picked(largest, view.full.includes("{") ? membersOf(view) : null, "start", view.full);
  }
}

function showSide(side) {
  now = side;
  const pickLeaf = (leaf) => model.choose(leaf, "far");
  const pickPath = (path) => goTo({ leaf: path });
  showTitle(side);
  showSummary(byId("summary"), side, goTo);
  showFindingList(byId("findings"), side, pickPath);
  showMemory(byId("memory"), [side], pickLeaf);
  showModel(side);
  timeline = showTime(byId("time"), side, { module: modulePlace, traffic: () => goTo({ at: "traffic", tab: "traffic-by-line" }) });
  showMesh(byId("mesh"), side, pickLeaf);
  showTraffic(byId("traffic"), side);
  const wrong = findingCount(side, "error") + findingCount(side, "warning");
  sections.set([["summary", "Summary"], ...(wrong ? [["findings", "Findings", wrong, findingCount(side, "error") ? "bad" : "warn"]] : []), ["memory", "Memory"],
    ...(side.time ? [["time", "Time"]] : []), ["model", "Model"], ...(side.leaves.length ? [["leaf", "Leaf"]] : []), ["mesh", "Mesh"], ["traffic", "Collectives"]]);
}

// What shows the leaves of a module, by the name that the compiler has for it; or null.
function modulePlace(name) {
  if (!name || !model) return null;
  const plain = (path) => path.replace(/\{[^}]*\}/g, "#").split(".").filter((key) => !/^(\d+|#)$/.test(key)).join(".");
  const wanted = plain(name);
  const within = (path) => plain(path) === wanted || plain(path).startsWith(`${wanted}.`);
  if (!wanted || !now.leaves.some((leaf) => within(leaf.path))) return null;
  return () => {
    const find = (view) => (view.full && plain(view.full) === wanted ? view : view.leaf ? null : viewsIn(view).map(find).find(Boolean) || null);
    const view = find(model.root);
    goTo({ at: "model" });
    if (view) { model.zoom(view, "far"); model.tree.open.add(view.full); model.tree.reveal(view); model.tree.light(view); }
    else { model.search.value = wanted; model.set({ q: wanted }); }
  };
}

function showTitle(side) {
  const title = side ? make("h1", {}, both ? letter(side) : "", both ? " " : "", both ? side.name : given.title) : make("h1", {}, "Two layouts compared");
  byId("top").replaceChildren(title, side ? make("p", { class: "faint" }, [plural(side.devices, "device"), ...(side.leaves.length ? [plural(side.leaves.length, "leaf", "leaves"), `${showBytes(side.tree.bytes)} in all`] : [])].join(" · ")) : "",
    side ? make("p", { class: `faint verdict-line ${side.verdict.state}`, id: "verdict" }, side.verdict.text) : "");
}

function choose(view) {
  byId("differences").hidden = view !== "";
  byId("report").hidden = view === "";
  if (view === "") {
    now = null;
    showTitle(null);
    if (!compared) compared = showDifferences(byId("differences"), sides, { leaf: (side, leaf) => { open(LETTERS[side.number].toLowerCase()); if (leaf) goTo({ leaf: leaf.path }); }, view: (number) => open(LETTERS[number].toLowerCase()) });
    sections.set(compared);
  } else showSide(sides[view === "b" ? 1 : 0]);
  for (const button of byId("sides").querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.view === view);
}

// Another of the three pages of a comparison, from its top.
function open(view) {
  link.set({ view, at: "", leaf: "", zoom: "", tab: "" }, true);
  choose(view);
  scrollTo(0, 0);
}

// Shows what the address says.
function follow() {
  choose(both ? (["a", "b"].includes(link.get("view")) ? link.get("view") : "") : "a");
  if (link.get("tab")) openTab(link.get("tab"));
  const at = link.get("at");
  if (at && at !== first()) sections.jump(at, false);
}

// The drawings take their colours from the theme.
function redraw() {
  for (const drawing of [model, timeline]) if (drawing) drawing.draw();
  dispatchEvent(new Event("resize"));
}

byId("side").replaceChildren(make("div", { class: "brand" }, make("b", {}, "Shardwise"), " ", make("span", { class: "faint" }, given.version)), sections.menu,
  make("nav", { id: "sides", class: "sides", hidden: !both, "aria-label": "Which page to show" }, both ? [["", "Differences"], ["a", "A"], ["b", "B"]].map(([view, name], i) => make("button", {
    type: "button", "data-view": view, "data-side": i ? i - 1 : null, title: i ? sides[i - 1].name : "What changed from A to B", onclick: () => open(view),
  }, name)) : []),
  make("nav", { "aria-label": "Sections" }, sections.list), themeButton(redraw));
byId("foot").replaceChildren(make("p", {},
  "exact: arithmetic on shapes. compiled: reported by the chips' own compiler. modelled: an estimate. Everything is in this file; nothing is loaded. "),
  make("p", {}, make("kbd", {}, "/"), " searches the leaves. The address keeps what is chosen: copy it to show the same to others."));

// Which tab of a section is chosen is a part of the address too.
byId("report").addEventListener("click", (event) => {
  const tab = event.target.closest('[role="tab"]');
  if (tab && tab.id) link.set({ tab: tab.id });
});
addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  if (!now) open("a");
  if (!model) return;
  sections.jump("model", false);
  model.search.focus();
  model.search.select();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
follow();
