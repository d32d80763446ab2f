// The model as a tree: search, fold, sort; bytes as bars, with replicated leaves in their own colour.

class Tree {
  constructor(element, side, { pickLeaf, pickModule }) {
    Object.assign(this, { element, side, pickLeaf, pickModule });
    this.open = new Set([""]);
    this.state = { query: "", sort: "order", fold: true, groups: new Set() };
    this.at = 0;
    this.build();
  }

  build() {
    const search = make("input", {
      type: "search", id: "search", placeholder: "path, spec, dtype …", "aria-label": "Search leaves",
      oninput: () => this.set({ query: search.value.trim().toLowerCase() }),
    });
    const sort = make("select", { id: "sort", "aria-label": "Sort by", onchange: () => this.set({ sort: sort.value }) },
      [["order", "in the model's order"], ["held", "largest first"], ["copies", "most copies first"], ["name", "by name"]]
        .map(([value, text]) => make("option", { value }, text)));
    const fold = make("input", { type: "checkbox", id: "fold", checked: true, onchange: () => this.set({ fold: fold.checked }) });
    const button = (text, act) => make("button", { type: "button", onclick: act }, text);
    this.status = make("p", { class: "status", role: "status" });
    this.legend = make("div", { class: "legend", role: "group", "aria-label": "Filter by how leaves are split" },
      this.side.groups.map((group) => this.legendEntry(group)));
    this.rows = make("div", { class: "tree", role: "treegrid", tabindex: 0, "aria-label": "Leaves of the model" });
    this.element.replaceChildren(
      make("div", { class: "tools" },
        search, sort, make("label", { class: "check" }, fold, " fold repeated layers"),
        button("Open all", () => this.openAll()), button("Close all", () => this.closeAll())),
      this.legend,
      this.rows, this.status);
    this.rows.append(make("div", { class: "tree-head", role: "row" },
      ["leaf", "spec", "bytes/device", "", "copies"].map((text) => make("span", { role: "columnheader" }, text))));
    this.list = new RowList(this.rows, (row, index) => this.draw(row, index));
    this.rows.addEventListener("keydown", (event) => this.key(event));
    // The first two levels are open if there are few leaves.
    for (const node of folded(this.side.tree)) if (this.side.leaves.length < 400) this.open.add(node.path + node.name);
    this.set({});
  }

  legendEntry(group) {
    const names = { whole: "replicated", error: "cannot be split this way", "one device": "on the only device" };
    const entry = make("button", {
      type: "button", class: "key", "aria-pressed": false, "data-group": group.name,
      onclick: () => {
        const { groups } = this.state;
        if (!groups.delete(group.name)) groups.add(group.name);
        entry.setAttribute("aria-pressed", groups.has(group.name));
        this.set({});
      },
    }, make("span", { class: `swatch ${group.name === "whole" ? "hatched" : ""}`, style: `--c:var(${group.colour})` }),
    `${names[group.name] || `split over ${group.name}`} `,
    make("span", { class: "faint" }, `${plural(group.count, "leaf", "leaves")}, ${showBytes(group.held)}`));
    return entry;
  }

  set(change) {
    Object.assign(this.state, change);
    this.found = this.matching();
    this.list.set(this.visible());
    const total = this.side.leaves.length;
    this.status.textContent = this.found
      ? `${plural(this.found.size, "leaf", "leaves")} of ${total.toLocaleString("en")}, ${showBytes([...this.found].reduce((t, l) => t + l.held, 0))} on each device (exact)`
      : `${plural(total, "leaf", "leaves")}, ${showBytes(this.side.tree.held)} of ${showBytes(this.side.tree.bytes)} on each device (exact)`;
  }

  // The leaves that match the search and the legend, or null for all.
  matching() {
    const { query, groups } = this.state;
    if (!query && !groups.size) return null;
    return new Set(this.side.leaves.filter((leaf) =>
      (!groups.size || groups.has(leaf.group)) &&
      (!query || `${leaf.path} ${leaf.spec} ${showShape(leaf.dtype, leaf.shape)} ${leaf.kind}`.toLowerCase().includes(query))));
  }

  kept(node) {
    if (!this.found) return true;
    if (this.keptOf !== this.found) [this.keptOf, this.keeps] = [this.found, new Map()];
    const known = this.keeps.get(node);
    if (known !== undefined) return known;
    const kept = node.leaf
      ? (node.members || [node]).some((member) => this.found.has(member.leaf))
      : node.children.some((child) => this.kept(child));
    this.keeps.set(node, kept);
    return kept;
  }

  visible() {
    const rows = [];
    const order = {
      held: (a, b) => b.held - a.held, copies: (a, b) => b.copies - a.copies || b.held - a.held,
      name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }),
    }[this.state.sort];
    const walk = (node, depth) => {
      let children = this.state.fold ? folded(node) : node.children;
      if (order) children = [...children].sort(order);
      for (const child of children) {
        if (!this.kept(child)) continue;
        rows.push({ node: child, depth });
        if (!child.leaf && this.isOpen(child)) walk(child, depth + 1);
      }
    };
    walk(this.side.tree, 0);
    this.at = Math.min(this.at, Math.max(0, rows.length - 1));
    return rows;
  }

  isOpen(node) {
    // What is searched for is shown.
    return this.found ? true : this.open.has(node.path + node.name);
  }

  draw({ node, depth }, index) {
    const leaf = node.leaf;
    const groups = [...node.groups].sort((a, b) => b[1] - a[1]);
    const whole = this.side.tree.held || 1;
    const bar = make("span", { class: "bar", "aria-hidden": true },
      groups.map(([name, held]) => make("span", {
        class: name === "whole" ? "hatched" : "", style: `width:${(100 * held) / whole}%;--c:var(${this.colour(name)})`,
      })));
    const open = !leaf && this.isOpen(node);
    const times = node.members && /^\{/.test(node.name) ? ` ×${node.members.length}` : "";
    const copies = leaf ? (leaf.faults.length ? "error" : `${leaf.copies}`) : "";
    return make("div", {
      class: `row${index === this.at ? " at" : ""}${leaf && leaf === this.chosen ? " chosen" : ""}${leaf && leaf.group === "whole" ? " whole" : ""}`,
      role: "row", id: `row-${index}`, "aria-level": depth + 1, "aria-expanded": leaf ? null : open,
      "aria-selected": Boolean(leaf && leaf === this.chosen), "data-path": node.path,
      onclick: () => { this.at = index; this.act(node); },
    },
    make("span", { role: "gridcell", class: "name", style: `padding-left:${depth * 1.1}rem`, title: node.path },
      make("span", { class: "twist", "aria-hidden": true }, leaf ? "" : open ? "▾" : "▸"), node.name,
      times && make("span", { class: "times" }, times),
      leaf ? make("span", { class: "faint shape" }, ` ${showShape(leaf.dtype, leaf.shape)}${node.members ? ` ×${node.members.length}` : ""}`) : ""),
    make("span", { role: "gridcell", class: "spec" }, leaf ? leaf.spec : make("span", { class: "faint" }, plural(node.count, "leaf", "leaves"))),
    make("span", { role: "gridcell", class: "right" }, showBytes(node.held)),
    make("span", { role: "gridcell" }, bar),
    make("span", { role: "gridcell", class: `right${copies > 1 ? " copied" : ""}` }, copies));
  }

  colour(name) {
    return this.side.groups.find((group) => group.name === name).colour;
  }

  act(node) {
    if (node.leaf) {
      this.chosen = node.leaf;
      this.pickLeaf(node.leaf, node.members);
    } else {
      const key = node.path + node.name;
      if (!this.open.delete(key)) this.open.add(key);
      this.pickModule(node);
    }
    this.set({});
  }

  key(event) {
    const rows = this.list.rows;
    const row = rows[this.at];
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -rows.length, End: rows.length };
    if (moves[event.key]) this.at = Math.max(0, Math.min(rows.length - 1, this.at + moves[event.key]));
    else if (!row) return;
    else if (event.key === "Enter" || event.key === " ") this.act(row.node);
    else if (event.key === "ArrowRight" && !row.node.leaf && !this.isOpen(row.node)) this.act(row.node);
    else if (event.key === "ArrowLeft" && !row.node.leaf && this.isOpen(row.node)) this.act(row.node);
    else return;
    event.preventDefault();
    this.list.reveal(this.at);
    this.rows.setAttribute("aria-activedescendant", `row-${this.at}`);
  }

  openAll() {
    const walk = (node) => {
      this.open.add(node.path + node.name);
      (this.state.fold ? folded(node) : node.children).forEach((child) => { if (!child.leaf) walk(child); });
    };
    walk(this.side.tree);
    this.set({});
  }

  closeAll() {
    this.open.clear();
    this.set({});
  }

  // Shows a leaf that was chosen elsewhere: opens what is above it.
  reveal(leaf) {
    this.chosen = leaf;
    const keys = leaf.path.split(".");
    let node = this.side.tree;
    const inside = (child) => child.path === leaf.path || (child.members || [child]).some((m) => leaf.path.startsWith(`${m.path}.`) || m.path === leaf.path);
    for (let depth = 0; depth < keys.length; depth++) {
      const next = (this.state.fold ? folded(node) : node.children).find(inside);
      if (!next) break;
      if (!next.leaf) this.open.add(next.path + next.name);
      node = next;
    }
    this.set({});
    const index = this.list.rows.findIndex((row) => row.node === node);
    if (index >= 0) { this.at = index; this.list.reveal(index); }
  }
}
