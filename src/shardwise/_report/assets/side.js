// The list of sections beside the page: where one is, and how one gets elsewhere.

class SideList {
  // `go(id)` is called when a section is chosen, `at(id)` when one is scrolled to.
  constructor(element, { go, at }) {
    Object.assign(this, { element, go, at, links: new Map(), jumped: false });
    this.menu = make("button", { type: "button", id: "menu", "aria-expanded": false, "aria-controls": "sections", onclick: () => this.expand(!this.isOpen) }, "Sections");
    this.list = make("ol", { id: "sections" });
    addEventListener("scroll", () => this.scrolled(), { passive: true });
    // After a jump, the section that was asked for is the one until the reader moves.
    for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      addEventListener(kind, () => { this.jumped = false; }, { passive: true, capture: true });
    }
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.isOpen) return;
      this.expand(false);
      this.menu.focus();
    });
  }

  get isOpen() { return this.menu.getAttribute("aria-expanded") === "true"; }

  // On a phone the list is folded into its button.
  expand(open) {
    this.menu.setAttribute("aria-expanded", open);
    this.element.classList.toggle("open", open);
  }

  // `entries` are rows of a section's id, its name, and a count or nothing.
  set(entries) {
    this.links = new Map(entries.map(([id, name, count, state]) => [id, make("a", {
      href: `#${id}`, onclick: (event) => { event.preventDefault(); this.expand(false); this.go(id); },
    }, make("span", {}, name), count ? make("span", { class: `count ${state || ""}` }, count) : "")]));
    this.list.replaceChildren(...[...this.links.values()].map((link) => make("li", {}, link)));
    this.mark(entries[0][0]);
  }

  mark(id) {
    if (!this.links.has(id)) return;
    this.now = id;
    for (const [one, link] of this.links) {
      if (one === id) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
    this.menu.textContent = this.links.get(id).firstChild.textContent;
  }

  // A jump is not a reader who scrolls past.
  jump(id, focus = true) {
    const section = byId(id);
    if (!section) return;
    this.jumped = true;
    clearTimeout(this.later);
    section.scrollIntoView({ block: "start" });
    this.mark(id);
    const title = section.querySelector("h2");
    if (focus && title) { title.tabIndex = -1; title.focus({ preventScroll: true }); }
  }

  scrolled() {
    if (this.jumped) return;
    const ids = [...this.links.keys()];
    let now = ids[0];
    for (const id of ids) {
      const section = byId(id);
      if (section && section.getBoundingClientRect().top < innerHeight * 0.3) now = id;
    }
    if (now === this.now) return;
    this.mark(now);
    clearTimeout(this.later);
    this.later = setTimeout(() => this.at(now), 200);
  }
}
