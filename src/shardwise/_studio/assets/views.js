// What is below the figures: one view at a time, of the state's best answer.

const VIEWS = ["Model", "Memory", "Time", "Collectives", "Findings", "Mesh", "Search", "Pinned"];

class Views {
  constructor(tabs, element, page) {
    Object.assign(this, { tabs, element, page, name: "Model", side: null, kept: null });
    this.buttons = new Map();
    const list = make("div", { role: "tablist", class: "tabs", "aria-label": "Details" }, VIEWS.map((name) => {
      const tab = make("button", {
        type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "view", onclick: () => this.choose(name),
        onkeydown: (event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          if (!step) return;
          event.preventDefault();
          const next = VIEWS[(VIEWS.indexOf(name) + step + VIEWS.length) % VIEWS.length];
          this.choose(next);
          this.buttons.get(next).focus();
        },
      }, name);
      this.buttons.set(name, tab);
      return tab;
    }));
    tabs.replaceChildren(list);
    element.setAttribute("role", "tabpanel");
  }

  choose(name, scroll = false) {
    this.name = name;
    this.drawn = null;
    this.draw();
    if (scroll) { this.element.scrollIntoView({ block: "nearest" }); this.buttons.get(name).focus({ preventScroll: true }); }
  }

  count(name, number) {
    this.buttons.get(name).textContent = number ? `${name} ${number}` : name;
  }

  // Draws the view, unless it shows this very answer already.
  draw() {
    const { known, query } = this.page;
    for (const [name, tab] of this.buttons) {
      tab.setAttribute("aria-selected", name === this.name);
      tab.tabIndex = name === this.name ? 0 : -1;
    }
    this.element.setAttribute("aria-labelledby", `tab-${this.name}`);
    const proved = known.compiled && !known.compiled.error && known.compiled.state.query === query ? known.compiled : null;
    const best = proved || (known.exact && !known.exact.error ? known.exact : null);
    if (known.exact) this.count("Findings", (proved || known.exact).side ? (proved || known.exact).side.findings.length : 0);
    const key = [this.name, best && best.state.query, best && best.label, this.name === "Time" || this.name === "Collectives" ? known.estimate && known.estimate.state.query : ""].join("|");
    if (this.name !== "Search" && this.name !== "Pinned" && key === this.drawn) return;
    this.drawn = key;
    const side = best ? readSide(best.side, 0) : null;
    const place = this.element;
    if (this.name === "Search") return this.page.explorer.show(place);
    if (this.name === "Pinned") return showPins(place, this.page);
    if (!side) return place.replaceChildren(make("p", { class: "faint" }, known.exact && known.exact.error ? known.exact.error : "…"));
    const stale = best.state.query !== query;
    place.classList.toggle("stale-view", stale);
    ({
      Model: () => this.showModel(place, side),
      Memory: () => showMemory(place, [side]),
      Time: () => showStepTime(place, proved ? side : null, known.estimate, query, this.page),
      Collectives: () => showSent(place, proved ? side : null, known.estimate, query, this.page),
      Findings: () => this.showFindings(place, side, (path) => { this.chosen = path; this.choose("Model", true); }),
      Mesh: () => showMesh(place, side, (leaf) => { this.chosen = leaf.path; this.choose("Model", true); }),
    })[this.name]();
  }

  showModel(place, side) {
    if (!side.leaves.length) return place.replaceChildren(make("p", { class: "faint" }, "There are no leaves."));
    const [model, below] = [make("div", {}), make("section", { id: "leaf", "aria-labelledby": "leaf-title" })];
    place.replaceChildren(make("h2", { id: "model-title", class: "hidden" }, "The model"), model, below);
    // What was searched for, folded and open stays from one state to the next.
    const before = this.model;
    const by = before ? before.state.by.filter((name) => side.groups.some((group) => group.name === name)) : [];
    this.model = new ModelView(model, side, {
      state: before ? { ...before.state, by } : {},
      picked: (leaf, members, from, name) => { this.chosen = leaf.path; showLeaf(below, side, leaf, members, name); },
    });
    if (before) { this.model.tree.open = before.tree.open; this.model.tree.show(); }
    const leaf = side.leaves.find((one) => one.path === this.chosen) || side.leaves.reduce((most, one) => (one.held > most.held ? one : most));
    this.model.choose(leaf, "start");
  }

  showFindings(place, side, pick) {
    if (side.findings.length) return showFindingList(place, side, pick);
    return place.replaceChildren(make("h2", { id: "findings-title" }, "No findings"));
  }
}

function askCompiler(page, what) {
  return make("p", { class: "faint" }, what, " ", page.state.on === "none" ? "" : make("button", { type: "button", onclick: () => page.compile() }, "Compile it"));
}

function showStepTime(place, side, estimate, query, page) {
  if (side && side.time) {
    const box = make("div");
    const more = make("div", { id: "timed" });
    place.replaceChildren(box, more);
    box.append(make("h2", {}, "Time of one step (modelled, from the compiled program)"), make("p", {}, side.time.verdict),
      partsBar(side.time, Object.values(side.time.parts).reduce((a, b) => a + b, 0) || 1));
    showTimed(more, side, false);
    return;
  }
  if (!estimate || estimate.error) return place.replaceChildren(make("p", { class: "faint" }, estimate ? estimate.error : "Not estimated yet."));
  const found = estimate.estimate;
  const total = Object.values(found.parts).reduce((a, b) => a + b, 0) || 1;
  const lines = Object.entries(found.lines).slice(0, 20);
  const most = Math.max(...lines.map(([, seconds]) => seconds), 1e-12);
  place.replaceChildren(
    make("h2", {}, "Time of one step ", labelOf("modelled", estimate.state.query !== query)), make("p", {}, found.verdict),
    make("div", { class: "columns" },
      table(["part", "time", "share"], Object.entries(found.parts).map(([name, seconds]) => [name, showSeconds(seconds), showShare(seconds, total)]), { right: [1, 2], label: "Parts of a step" }),
      lines.length ? table(["collectives of line", "time", ""], lines.map(([name, seconds]) => [name === "?" ? "no line of yours" : name, showSeconds(seconds), make("span", { class: "bar wide", "aria-hidden": true }, make("span", { style: `width:${(100 * seconds) / most}%;--c:var(--cut3)` }))]), { right: [1], label: "Collectives by line" }) : ""),
    askCompiler(page, "Every kernel on a timeline, by module and line, needs the compiled program."));
}

function showSent(place, side, estimate, query, page) {
  if (side) return showTraffic(place, side);
  if (!estimate || estimate.error) return place.replaceChildren(make("p", { class: "faint" }, estimate ? estimate.error : "Not estimated yet."));
  const rows = Object.entries(estimate.estimate.by_axis).flatMap(([axes, kinds]) => Object.entries(kinds).map(([kind, { count, bytes }]) => [axes, kind, count, bytes])).sort((a, b) => b[3] - a[3]);
  const most = Math.max(...rows.map((row) => row[3]), 1);
  place.replaceChildren(make("h2", {}, "Collectives ", labelOf("modelled", estimate.state.query !== query)),
    rows.length ? table(["over", "kind", "times", "bytes sent by each device", ""], rows.map(([axes, kind, count, bytes]) => [axes, kind, `×${count.toLocaleString("en")}`, showBytes(bytes), make("span", { class: "bar wide", "aria-hidden": true }, make("span", { style: `width:${(100 * bytes) / most}%;--c:var(--cut0)` }))]), { right: [2, 3], label: "Collectives by axis" }) : make("p", {}, "The step has no collectives."),
    askCompiler(page, "Which line of your code causes which collective is in the compiled program."));
}
