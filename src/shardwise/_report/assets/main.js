// Puts the page together, and keeps its parts in step.

const given = JSON.parse(byId("data").textContent);
const sides = given.sides.map(readSide);
let now = sides[0];
let tree = null;
let map = null;
let timeline = null;

function pickLeaf(leaf, members, from) {
  showLeaf(byId("leaf"), now, leaf, members);
  if (from === "tree" || from === "map") byId("leaf-title").scrollIntoView({ block: "nearest" });
  if (tree && from !== "tree") tree.reveal(leaf);
  if (map && from !== "map") { map.chosen = leaf; map.draw(); }
  if (from === "far") {
    byId("leaf").scrollIntoView({ block: "start" });
    byId("leaf-title").focus({ preventScroll: true });
  }
}

// The drawings take their colours from the theme.
function redraw() {
  for (const drawing of [map, timeline]) if (drawing) drawing.draw();
}

function showModel(side) {
  const element = byId("model");
  const title = make("h2", { id: "model-title" }, "The model");
  if (!side.leaves.length) {
    element.replaceChildren(title, make("p", { class: "faint" }, "This compilation was read from a file, which has no layout: create the report where it is compiled."));
    byId("leaf").hidden = true;
    tree = map = null;
    return;
  }
  byId("leaf").hidden = false;
  const left = make("div", { class: "left" });
  const right = make("div", { class: "map" });
  element.replaceChildren(title, make("div", { class: "columns" }, left, right));
  map = new Treemap(right, side, { pickLeaf: (leaf) => pickLeaf(leaf, null, "map") });
  tree = new Tree(left, side, {
    pickLeaf: (leaf, members) => pickLeaf(leaf, members, "tree"),
    pickModule: (node) => map.zoom(node.members ? node.members[0].parent : node),
  });
  // Start with the largest leaf.
  const largest = side.leaves.reduce((most, leaf) => (leaf.held > most.held ? leaf : most));
  map.chosen = largest;
  showLeaf(byId("leaf"), side, largest);
}

function showSide(side) {
  now = side;
  const pickPath = (path) => pickLeaf(side.leaves.find((leaf) => leaf.path === path), null, "far");
  showFindings(byId("findings"), side, pickPath);
  showModel(side);
  showMesh(byId("mesh"), side, (leaf) => pickLeaf(leaf, null, "far"));
  showTraffic(byId("traffic"), side);
  timeline = byId("timed") ? showTimed(byId("timed"), side, sides.length > 1) : null;
  for (const button of byId("sides").querySelectorAll("button")) button.setAttribute("aria-pressed", Number(button.dataset.side) === side.number);
}

byId("top").replaceChildren(
  make("div", {}, make("h1", {}, given.title), make("p", { class: "faint" }, `Shardwise ${given.version}`)), themeButton(redraw));
byId("verdict").replaceChildren(...sides.map((side) => verdictBox(side, sides.length > 1)));
showMemory(byId("memory"), sides);
showTimes(byId("time"), sides);
if (sides.length > 1) {
  const choose = byId("sides");
  choose.hidden = false;
  choose.replaceChildren("shown below: ", ...sides.map((side) => make("button", {
    type: "button", "data-side": side.number, onclick: () => showSide(side),
  }, side.name)));
  showCompared(byId("compared"), sides, (side, leaf) => { if (side !== now) showSide(side); pickLeaf(leaf, null, "far"); });
}
showSide(now);
byId("foot").replaceChildren(make("p", {},
  "exact: arithmetic on shapes. compiled: reported by the chips' own compiler. modelled: an estimate. Everything is in this file; nothing is loaded."));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
