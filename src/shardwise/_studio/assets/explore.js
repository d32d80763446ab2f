// A search in the page: points arrive while it runs; a click loads one into the controls.

class Explorer {
  constructor(page) {
    Object.assign(this, { page, task: null, points: new Map(), found: null, chosen: null, error: "" });
    this.keep = new Set();
    this.proofs = 0;
  }

  async start() {
    this.stop();
    Object.assign(this, { points: new Map(), found: null, chosen: null, error: "", lines: [] });
    const { page } = this;
    this.of = page.query;
    try {
      const task = await ask("search", { state: page.query, keep: [...this.keep], compile: this.proofs });
      this.task = task.task;
      this.redraw();
      await this.follow(task.task);
    } catch (error) {
      this.error = error.message;
      this.task = null;
      this.redraw();
    }
  }

  async follow(number) {
    let [lines, points] = [0, 0];
    for (;;) {
      const news = await ask("task", { task: number, lines, points });
      if (this.task !== number) return;
      lines += news.lines.length;
      points += news.points.length;
      for (const point of news.points) this.points.set(point.key, point);
      if (news.lines.length) this.line = news.lines[news.lines.length - 1];
      this.seconds = news.seconds;
      if (news.done) {
        this.task = null;
        this.error = news.error;
        this.found = news.result;
        say(news.error || `Search done: ${plural(this.points.size, "layout")}`);
        this.redraw();
        return;
      }
      this.redraw(news.points.length > 0);
      await new Promise((next) => setTimeout(next, 400));
    }
  }

  stop() {
    if (this.task) ask("cancel", { task: this.task }).catch(() => {});
  }

  get candidates() {
    return [...this.points.values()].sort((a, b) => b.fits - a.fits || a.seconds / a.samples - b.seconds / b.samples);
  }

  redraw(anew = true) {
    if (this.page.views.name !== "Search" || !this.place) return;
    if (anew) this.show(this.place);
    else this.status.textContent = this.summary();
  }

  summary() {
    if (this.error) return this.error;
    if (this.task) return `${plural(this.points.size, "layout")} in ${Math.round(this.seconds || 0)} s. ${this.line || ""}`;
    if (!this.found) return "";
    return `${plural(this.points.size, "layout")} in ${Math.round(this.found.seconds)} s${this.found.stopped ? `; stopped early: ${this.found.stopped}` : ""}. ${this.found.notes.join(". ")}`;
  }

  show(place) {
    this.place = place;
    place.classList.remove("stale-view");
    const focused = place.contains(document.activeElement) ? document.activeElement.id || document.activeElement.dataset.number : null;
    const { page } = this;
    const check = (name, text) => {
      const box = make("input", { type: "checkbox", id: `keep-${name}`, onchange: () => (box.checked ? this.keep.add(name) : this.keep.delete(name)) });
      box.checked = this.keep.has(name);
      return make("label", { class: "check" }, box, ` ${text}`);
    };
    const proofs = make("select", { id: "proofs", "aria-label": "How many of the best to compile", onchange: () => { this.proofs = Number(proofs.value); } },
      [0, 1, 3].map((n) => make("option", { value: n }, n ? `compile the best ${n}` : "do not compile")));
    proofs.value = String(this.proofs);
    this.status = make("p", { class: "status", role: "status" }, this.summary());
    const head = [
      make("h2", {}, `Layouts on ${page.state.on}, by time and memory`),
      make("div", { class: "tools" },
        this.task ? make("button", { type: "button", id: "search-stop", onclick: () => this.stop() }, "Cancel") : make("button", { type: "button", id: "search-start", class: "primary", onclick: () => this.start(), disabled: page.state.on === "none" }, "Search"),
        check("strategy", "keep the strategy"), check("remat", "keep remat"), check("accumulate", "keep accumulation"), proofs),
      this.status,
    ];
    const candidates = this.candidates;
    if (!candidates.length) {
      place.replaceChildren(...head, make("p", { class: "faint" }, page.state.on === "none" ? "Choose chips to search on." : "Meshes, strategies, remat and accumulation are tried for this batch; rules of single paths are not. Each point can be loaded into the controls."));
    } else {
      const colours = new Map([...new Set(candidates.map((c) => c.strategy))].map((name, i) => [name, `--cut${i % 6}`]));
      const front = [];
      candidates.forEach((c, i) => { if (c.fits && (!front.length || c.peak_bytes < candidates[front[front.length - 1]].peak_bytes)) front.push(i); });
      const drawn = make("div");
      const priced = candidates.some((c) => c.cost !== null);
      const rows = candidates.slice(0, 60).map((c, i) => [
        make("button", { type: "button", class: "link", id: `load-${i}`, "aria-label": `Load layout ${i + 1}`, onclick: () => this.pick(i) }, `${i + 1}`), c.axes,
        make("span", {}, make("span", { class: "swatch", style: `--c:var(${colours.get(c.strategy)})` }), c.strategy), showSeconds(c.seconds), showBytes(c.peak_bytes),
        ...(priced ? [c.cost === null ? "" : showCost(c.cost)] : []), make("span", { class: c.fits ? "" : "bad-text" }, c.fits ? c.label : "does not fit"), showStep(c),
      ]);
      const listed = table(["", "mesh", "strategy", "step", "peak", ...(priced ? ["cost"] : []), "", "run with"], rows, { right: [0, 3, 4, ...(priced ? [5] : [])], label: "Layouts, fastest first" });
      listed.id = "candidates";
      listed.querySelectorAll("tbody tr").forEach((row, i) => {
        row.addEventListener("click", (event) => { if (event.target.tagName !== "BUTTON") this.pick(i); });
        if (candidates[i].query === page.query) row.classList.add("picked");
      });
      place.replaceChildren(...head, make("div", { class: "found" }, drawn, listed));
      this.plot = new Front(drawn, { candidates, front }, colours, (i) => this.pick(i));
      const at = candidates.findIndex((c) => c.query === page.query);
      this.plot.draw();
      this.plot.choose(at >= 0 ? at : 0);
      if (at < 0) this.plot.place.querySelectorAll(".point").forEach((point) => point.setAttribute("aria-pressed", false));
    }
    if (focused) {
      const again = byId(focused) || place.querySelector(`.point[data-number="${focused}"]`);
      if (again) again.focus();
    }
  }

  pick(number) {
    const candidate = this.candidates[number];
    say(`Loaded ${candidate.axes} ${candidate.strategy}`);
    this.page.load(candidate.query);
  }
}
