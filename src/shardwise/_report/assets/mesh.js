// The mesh as a grid, and everything that one device holds.

function showMesh(element, side, pickLeaf) {
  const axes = side.mesh.map(([axis, size]) => `${axis}=${size}`).join(",");
  const list = make("div", { class: "held", tabindex: 0, role: "list", "aria-label": "What the device holds" });
  const title = make("h3", { id: "device-title", "aria-live": "polite" });
  let chosen = 0;
  const held = side.leaves.reduce((total, leaf) => total + leaf.held, 0);
  const rows = new RowList(list, (leaf) => make("div", { class: "row", role: "listitem" },
    make("button", { type: "button", class: "link name", onclick: () => pickLeaf(leaf) }, leaf.path),
    make("span", { class: "slice" }, leaf.faults.length ? "cannot be split this way" : showSlice(sliceOf(side, leaf, chosen))),
    make("span", { class: "right" }, showBytes(leaf.held)),
    make("span", { class: "right faint" }, leaf.copies > 1 ? `one of ${leaf.copies}` : leaf.copies ? "only copy" : "")));
  const grid = deviceGrid(side, {
    label: `The mesh ${axes}`, chosen,
    pick: (device) => { chosen = device; show(); },
    paint: (device) => ({
      fill: device === chosen ? "var(--accent)" : "var(--cell)", text: `${device}`, title: showDevice(side, device),
    }),
  });
  const show = () => {
    title.textContent = `${showDevice(side, chosen)}: ${plural(side.leaves.length, "leaf", "leaves")}, ${showBytes(held)} (exact)`;
    grid.draw(chosen);
    rows.set(side.leaves);
  };
  element.replaceChildren(
    make("h2", { id: "mesh-title" }, `The mesh: ${axes}${side.chips ? ` on ${side.chips}` : ""}`),
    make("p", { class: "faint" }, "Every device is a cell, in the mesh's order. Choose one to see what it holds."),
    make("div", { class: "columns" }, make("div", { class: "scroll" }, grid.element), make("div", {}, title, list)));
  show();
}
