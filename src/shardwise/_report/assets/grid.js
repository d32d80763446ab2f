// The devices of a mesh as a grid of cells, in the mesh's order; arrow keys move within it.

function coordinates(side, device) {
  const found = new Array(side.sizes.length);
  for (let i = side.sizes.length - 1; i >= 0; i--) {
    found[i] = device % side.sizes[i];
    device = Math.floor(device / side.sizes[i]);
  }
  return found;
}

const showDevice = (side, device) =>
  coordinates(side, device).map((at, i) => `${side.axes[i]}=${at}`).join(",") || "the device";

// As many of the last axes as fit run along the columns; a single long one is wrapped.
function gridColumns(side) {
  let [columns, axes] = [1, 0];
  for (const size of [...side.sizes].reverse()) {
    const enough = columns > 1 && side.devices / columns <= 32;
    if (enough || columns * size > 32 || axes === side.sizes.length - 1) break;
    columns *= size;
    axes += 1;
  }
  if (columns > 1) return { columns, axes };
  if (side.devices <= 16) return { columns: side.devices, axes: side.sizes.length };
  return { columns: side.devices <= 64 ? 8 : side.devices <= 256 ? 16 : 32, axes: 0 };
}

// `paint(device)` returns { fill, text, title } for a cell; `pick(device)` is called on a click.
function deviceGrid(side, { paint, pick, chosen, label }) {
  const { columns, axes } = gridColumns(side);
  const cells = [];
  const rows = [];
  const longest = showDevice(side, side.devices - 1).length;
  for (let start = 0; start < side.devices; start += columns) {
    const row = make("div", { role: "row", class: "devices-row" });
    const at = coordinates(side, start).slice(0, side.sizes.length - axes);
    const named = at.map((value, i) => `${side.axes[i]}=${value}`).join(",");
    row.append(make("span", { class: "row-name", role: "rowheader", style: `min-width:${axes < side.sizes.length ? Math.min(longest, 24) : 0}ch` }, named));
    for (let device = start; device < Math.min(start + columns, side.devices); device++) {
      const cell = make("button", {
        type: "button", role: "gridcell", class: "device", tabindex: -1, "data-device": device,
        onclick: () => pick(device),
      });
      cells.push(cell);
      row.append(cell);
    }
    rows.push(row);
  }
  const grid = make("div", { role: "grid", class: `devices${side.devices > 64 ? " small" : ""}`, "aria-label": label }, rows);
  const draw = (now) => {
    cells.forEach((cell, device) => {
      const { fill, text, title, mate } = paint(device);
      cell.style.background = fill;
      cell.textContent = side.devices > 64 ? "" : text || "";
      cell.title = title;
      cell.setAttribute("aria-label", title);
      cell.setAttribute("aria-selected", device === now);
      cell.classList.toggle("mate", Boolean(mate));
      cell.tabIndex = device === (now ?? 0) ? 0 : -1;
    });
  };
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step) return;
    event.preventDefault();
    const to = Number(document.activeElement.dataset.device) + step;
    if (to < 0 || to >= side.devices) return;
    pick(to);
    cells[to].focus();
  });
  draw(chosen);
  return { element: grid, draw };
}
