// The model as a tree: one row for a leaf, a module, or the layers that are folded into one.

class Tree {
  // `model` says what is shown: see ModelView.
  constructor(element, model) {
    Object.assign(this, { element, model, side: model.side });
    this.open = new Set([""]);
    this.at = 0;
    this.rows = make("div", { class: "tree", role: "treegrid", tabindex: 0, "aria-label": "Leaves of the model" });
    this.status = make("p", { class: "status", role: "status" });
    element.replaceChildren(this.rows, this.status);
    this.rows.append(make("div", { class: "tree-head", role: "row" },
      ["leaf", "spec", "bytes/device", "", "copies"].map((text) => make("span", { role: "columnheader" }, text))));
    this.list = new RowList(this.rows, (row, index) => this.draw(row, index), { narrow: 46 });
    this.rows.addEventListener("keydown", (event) => this.key(event));
    this.rows.addEventListener("pointerover", (event) => {
      const row = event.target.closest(".row");
      model.light(row ? this.list.rows[Number(row.dataset.index)].view : null, "tree");
    });
    this.rows.addEventListener("pointerleave", () => model.light(null, "tree"));
    // The first levels are open if there are few leaves.
    if (this.side.leaves.length < 400) for (const view of viewsIn(model.root)) this.open.add(view.full);
  }

  show() {
    const rows = [];
    const walk = (view, depth) => {
      for (const child of this.model.inside(view)) {
        rows.push({ view: child, depth });
        if (!child.leaf && this.isOpen(child)) walk(child, depth + 1);
      }
    };
    walk(this.model.root, 0);
    this.at = Math.min(this.at, Math.max(0, rows.length - 1));
    this.list.set(rows);
    const { found } = this.model;
    const total = this.side.leaves.length;
    this.status.textContent = found
      ? `${plural(found.size, "leaf", "leaves")} of ${total.toLocaleString("en")}, ${showBytes([...found].reduce((t, l) => t + l.held, 0))} on each device (exact)`
      : `${plural(total, "leaf", "leaves")}, ${showBytes(this.side.tree.held)} of ${showBytes(this.side.tree.bytes)} on each device (exact)`;
  }

  isOpen(view) {
    // What is searched for is shown.
    return this.model.found ? true : this.open.has(view.full);
  }

  draw({ view, depth }, index) {
    const { leaf, node } = view;
    const { model } = this;
    const whole = model.weigh(model.root) || 1;
    const bar = make("span", { class: "bar", "aria-hidden": true },
      [...model.groupsOf(view)].sort((a, b) => b[1] - a[1]).map(([name, held]) => make("span", {
        class: name === "whole" ? "hatched" : "", style: `width:${Math.min(100, (100 * held) / whole)}%;--p:${model.groups.get(name).paint}`,
      })));
    const open = !leaf && this.isOpen(view);
    const count = membersOf(view).length;
    const copies = leaf ? (leaf.faults.length ? "error" : `${leaf.copies}`) : "";
    const chosen = leaf && model.chosen && leavesIn(view).includes(model.chosen);
    return make("div", {
      class: `row${index === this.at ? " at" : ""}${chosen ? " chosen" : ""}${view === model.lit ? " lit" : ""}`,
      role: "row", id: `row-${index}`, "aria-level": depth + 1, "aria-expanded": leaf ? null : open,
      "aria-selected": Boolean(chosen), "data-path": node.path, "data-index": index,
      onclick: () => { this.at = index; this.act(view); },
    },
    make("span", { role: "gridcell", class: "name", style: `--depth:${depth}`, title: view.full },
      make("span", { class: "twist", "aria-hidden": true }, leaf ? "" : open ? "▾" : "▸"), view.label,
      leaf && membersOf(view).some((member) => this.side.flags.has(member.path)) ? flagOf(this.side, membersOf(view)) : "",
      count > 1 && /^\{|\.\{/.test(view.label) ? make("span", { class: "times" }, ` ×${count}`) : "",
      leaf ? make("span", { class: "faint shape" }, ` ${showShape(leaf.dtype, leaf.shape)}${count > 1 ? ` ×${count}` : ""}`) : ""),
    make("span", { role: "gridcell", class: "spec", title: leaf ? leaf.spec : null }, leaf ? specText(this.side, leaf.spec) : make("span", { class: "faint" }, plural(node.count, "leaf", "leaves"))),
    make("span", { role: "gridcell", class: "right" }, showBytes(model.weigh(view))),
    make("span", { role: "gridcell", class: "bar-cell" }, bar),
    make("span", { role: "gridcell", class: "right copies" }, copies));
  }

  act(view) {
    if (view.leaf) this.model.choose(view.leaf, "tree", view);
    else {
      if (!this.open.delete(view.full)) this.open.add(view.full);
      this.model.zoom(view, "tree");
    }
    this.show();
  }

  key(event) {
    const rows = this.list.rows;
    const row = rows[this.at];
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -rows.length, End: rows.length };
    if (moves[event.key]) this.at = Math.max(0, Math.min(rows.length - 1, this.at + moves[event.key]));
    else if (!row) return;
    else if (event.key === "Enter" || event.key === " ") this.act(row.view);
    else if (event.key === "ArrowRight" && !row.view.leaf && !this.isOpen(row.view)) this.act(row.view);
    else if (event.key === "ArrowLeft" && !row.view.leaf && this.isOpen(row.view)) this.act(row.view);
    else return;
    event.preventDefault();
    this.list.reveal(this.at);
    this.rows.setAttribute("aria-activedescendant", `row-${this.at}`);
    if (rows[this.at]) this.model.light(rows[this.at].view, "tree");
  }

  openAll() {
    const walk = (view) => {
      this.open.add(view.full);
      for (const child of viewsIn(view)) if (!child.leaf) walk(child);
    };
    walk(this.model.root);
    this.show();
  }

  closeAll() {
    this.open.clear();
    this.show();
  }

  // Marks the row of a view, or of the closed module around it.
  light(view) {
    const rows = this.list.rows;
    let index = -1;
    for (let one = view; one && one.parent && index < 0; one = one.parent) index = rows.findIndex((row) => row.view === one);
    for (const row of this.rows.querySelectorAll(".row")) row.classList.toggle("lit", Number(row.dataset.index) === index);
  }

  // Shows a leaf that was chosen elsewhere: opens what is above it.
  reveal(view) {
    for (let one = view.parent; one; one = one.parent) this.open.add(one.full);
    this.show();
    const index = this.list.rows.findIndex((row) => row.view === view);
    if (index >= 0) { this.at = index; this.list.reveal(index); }
  }
}

function flagOf(side, members) {
  const found = members.flatMap((member) => side.flags.get(member.path) || []);
  const worst = found.some((finding) => finding.severity === "error") ? "error" : "warning";
  return make("span", { class: `severity ${worst}`, role: "img", "aria-label": worst, title: `${found[0].code} ${found[0].name}: ${found[0].message}` }, worst === "error" ? " ✗" : " !");
}

// A spec with its axes in their colours.
function specText(side, spec) {
  const parts = spec.split(/'([^']*)'/);
  return parts.map((part, i) => (i % 2 && side.axes.includes(part)
    ? make("span", { class: "axis-name", style: `--c:var(${axisColour(side.axes.indexOf(part))})` }, `'${part}'`) : i % 2 ? `'${part}'` : part));
}
