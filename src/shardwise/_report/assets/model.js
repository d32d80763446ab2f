// The model as a tree and as a map, in step: what one shows, chooses or points at, so does the other.

const SORTS = [["order", "in the model's order"], ["held", "largest first"], ["copies", "most copies first"], ["name", "by name"]];

class ModelView {
  // `picked(leaf, members, from)` is called when a leaf is chosen, `changed(state)` when what is
  // shown changes; `state` is what was shown before.
  constructor(element, side, { picked, changed = () => {}, state = {} }) {
    Object.assign(this, { side, picked, changed, chosen: null, lit: null });
    this.state = { q: "", by: [], sort: "order", fold: true, zoom: "", ...state };
    this.groups = new Map(side.groups.map((group) => [group.name, group]));
    const [left, right] = [make("div", { class: "left" }), make("div", { class: "map" })];
    element.replaceChildren(this.tools(), this.legend(), make("div", { class: "columns model" }, left, right));
    this.measure();
    this.tree = new Tree(left, this);
    this.map = new Treemap(right, side, { model: this });
    this.tree.show();
    const zoomed = this.state.zoom && viewNamed(this.root, this.state.zoom);
    this.map.zoom(zoomed && !zoomed.leaf ? zoomed : this.root);
  }

  get root() { return rootView(this.side, this.state.fold); }

  tools() {
    const { state } = this;
    this.search = make("input", {
      type: "search", id: "search", placeholder: "Search path, spec, dtype …   ( / )", "aria-label": "Search leaves", "aria-keyshortcuts": "/", value: state.q,
      oninput: () => this.set({ q: this.search.value.trim() }),
      onkeydown: (event) => { if (event.key === "Escape" && this.search.value) { this.search.value = ""; this.set({ q: "" }); event.stopPropagation(); } },
    });
    const sort = make("select", { id: "sort", "aria-label": "Sort by", onchange: () => this.set({ sort: sort.value }) },
      SORTS.map(([value, text]) => make("option", { value, selected: value === state.sort }, text)));
    const fold = make("input", { type: "checkbox", id: "fold", checked: state.fold, onchange: () => this.set({ fold: fold.checked, zoom: "" }) });
    const button = (text, act) => make("button", { type: "button", onclick: act }, text);
    return make("div", { class: "tools" }, this.search, sort, make("label", { class: "check" }, fold, " fold repeated layers"),
      button("Open all", () => this.tree.openAll()), button("Close all", () => this.tree.closeAll()));
  }

  legend() {
    return make("div", { class: "legend", role: "group", "aria-label": "Filter by how leaves are split" },
      this.side.groups.map((group) => make("button", {
        type: "button", class: "key", "aria-pressed": this.state.by.includes(group.name), "data-group": group.name,
        onclick: (event) => {
          const by = this.state.by.filter((name) => name !== group.name);
          if (by.length === this.state.by.length) by.push(group.name);
          event.currentTarget.setAttribute("aria-pressed", by.includes(group.name));
          this.set({ by });
        },
      }, make("span", { class: `swatch ${group.name === "whole" ? "hatched" : ""}`, style: `--p:${group.paint}` }),
      `${groupName(group.name)} `, make("span", { class: "faint" }, `${plural(group.count, "leaf", "leaves")}, ${showBytes(group.held)}`))));
  }

  set(change) {
    Object.assign(this.state, change);
    this.measure();
    this.tree.show();
    this.map.zoom("fold" in change ? this.root : this.map.root);
    if ("fold" in change && this.chosen) this.tree.reveal(viewOfLeaf(this.root, this.chosen));
    this.changed(this.state);
  }

  // The leaves that match the search and the legend, or null for all; and how large each view is.
  measure() {
    const { q, by } = this.state;
    const query = q.toLowerCase();
    this.weights = new Map();
    this.found = !query && !by.length ? null : new Set(this.side.leaves.filter((leaf) =>
      (!by.length || by.includes(leaf.group)) &&
      (!query || `${leaf.path} ${leaf.spec} ${showShape(leaf.dtype, leaf.shape)} ${leaf.kind}`.toLowerCase().includes(query))));
  }

  // The bytes of a view that match, or -1 if none of its leaves does.
  weigh(view) {
    if (!this.found) return view.node.held;
    const known = this.weights.get(view);
    if (known !== undefined) return known;
    let held = -1;
    if (view.leaf) {
      for (const member of membersOf(view)) if (this.found.has(member.leaf)) held = Math.max(0, held) + member.leaf.held;
    } else {
      for (const child of viewsIn(view)) { const one = this.weigh(child); if (one >= 0) held = Math.max(0, held) + one; }
    }
    this.weights.set(view, held);
    return held;
  }

  // The bytes that match, by the axes that split them.
  groupsOf(view) {
    if (!this.found) return view.node.groups;
    const sums = new Map();
    for (const leaf of leavesIn(view)) if (this.found.has(leaf)) sums.set(leaf.group, (sums.get(leaf.group) || 0) + leaf.held);
    return sums;
  }

  inside(view) {
    const children = this.found ? viewsIn(view).filter((child) => this.weigh(child) >= 0) : [...viewsIn(view)];
    const order = {
      held: (a, b) => this.weigh(b) - this.weigh(a), copies: (a, b) => b.node.copies - a.node.copies || this.weigh(b) - this.weigh(a),
      name: (a, b) => a.label.localeCompare(b.label, "en", { numeric: true }),
    }[this.state.sort];
    return order ? children.sort(order) : children;
  }

  light(view, from) {
    if (view === this.lit) return;
    this.lit = view;
    if (from !== "tree") this.tree.light(view);
    if (from !== "map") this.map.light(view);
  }

  choose(leaf, from, view = viewOfLeaf(this.root, leaf)) {
    this.chosen = leaf;
    this.map.mark();
    if (from !== "tree") this.tree.reveal(view);
    // One of several layers is called by its own path, unless all of them were chosen.
    const alike = view.full.includes("{") ? membersOf(view) : null;
    this.picked(leaf, alike, from, from === "far" || (alike && leaf !== alike[0].leaf) ? leaf.path : view.full);
  }

  zoom(view, from) {
    if (from !== "map") this.map.zoom(view.leaf ? view.parent : view);
    this.state.zoom = this.map.root.full;
    if (from === "map" && view.parent) { this.tree.open.add(view.full); this.tree.reveal(view); }
    this.changed(this.state);
  }

  draw() { this.map.draw(); }
}
