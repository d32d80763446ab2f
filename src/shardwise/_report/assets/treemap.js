// The model by bytes per device: each leaf an area, modules around theirs. The left edge of an area
// has the colours of the axes that split its rows, the top edge of those that split its last dim.

// What is shown where nobody chooses: all leaves, with repeated layers as one.
class WholeModel {
  constructor(side) { Object.assign(this, { side, root: rootView(side, true), found: null, chosen: null }); }
  weigh(view) { return view.node.held; }
  light() {}
  choose() {}
  zoom() {}
}

class Treemap {
  constructor(element, side, { model = new WholeModel(side), scale = 1, label, choose }) {
    Object.assign(this, { side, model, scale, label, choose: choose || ((view) => model.choose(view.leaf, "map", view)) });
    this.root = model.root;
    this.canvas = make("canvas", { tabindex: 0, role: "img" });
    this.spot = make("div", { class: "spot chosen", hidden: true });
    this.glow = make("div", { class: "spot lit", hidden: true });
    this.crumbs = make("div", { class: "crumbs", role: "navigation", "aria-label": "Where the map is" });
    this.status = make("p", { class: "status", role: "status" }, "");
    this.box = make("div", { class: "map-box" }, this.canvas, this.glow, this.spot);
    element.replaceChildren(this.crumbs, this.box, this.status);
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.hover(this.find(event)));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("click", (event) => { const area = this.find(event); if (area) this.act(area.view); });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.zoom(this.root);
  }

  describe() {
    const summary = this.side.groups.map((g) => `${GROUP_NAMES[g.name] || g.name}: ${showBytes(g.held)} in ${plural(g.count, "leaf", "leaves")}`);
    return `${this.label || "Bytes on each device, by leaf"}. ${summary.join("; ")}. Arrow keys go through the areas, largest first; Enter shows one, + zooms into its module, − out.`;
  }

  zoom(view) {
    this.root = this.model.weigh(view) >= 0 ? view : this.model.root;
    const crumbs = [];
    for (let one = this.root; one; one = one.parent) {
      const target = one;
      const text = one.label || "the model";
      crumbs.unshift(one.parent ? " › " : "", one === this.root ? make("b", { "aria-current": "true" }, text)
        : make("button", { type: "button", class: "link", onclick: () => { this.zoom(target); this.model.zoom(target, "map"); } }, text));
    }
    crumbs.push(make("span", { class: "faint" }, ` ${showBytes(Math.max(0, this.model.weigh(this.root)))} on each device${this.model.found ? ", what is found" : ""}`));
    this.crumbs.replaceChildren(...crumbs);
    this.draw();
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return;
    const height = Math.round(Math.max(240, Math.min(478, width * 0.8)) * this.scale);
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = this.pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.textBaseline = "top";
    this.colours = Object.fromEntries(["paper", "ink", "faint", "line", "soft", "cell", "whole", "error"].map((name) => [name, colourOf(`--${name}`)]));
    this.axes = this.side.axes.map((_, axis) => colourOf(axisColour(axis)));
    this.byName = new Map(this.side.groups.map((group) => [group.name, group]));
    this.areas = [];
    this.heads = [];
    this.rects = new Map();
    if (this.root.leaf) this.inside(this.root, 0, 0, width, height, 0);
    else this.place(this.root, 0, 0, width, height, 0);
    for (const head of this.heads) this.fillHead(head);
    for (const area of this.areas) this.fill(area);
    // For whoever reads the page and not the picture.
    Object.assign(this.canvas.dataset, { areas: this.areas.length, leaves: this.areas.reduce((n, area) => n + leavesIn(area.view).length, 0) });
    this.canvas.setAttribute("aria-label", this.describe());
    this.mark();
    this.glow.hidden = true;
  }

  fillHead({ view, x, y, w, h }) {
    const { pen, colours } = this;
    pen.fillStyle = colours.soft;
    pen.fillRect(x, y, w, h);
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    pen.fillStyle = colours.ink;
    pen.font = "600 11px system-ui, sans-serif";
    const name = clipped(pen, this.nameOf(view), w - 10);
    pen.fillText(name, x + 5, y + 4);
    const used = pen.measureText(name).width;
    pen.font = "11px system-ui, sans-serif";
    const bytes = showBytes(this.model.weigh(view));
    if (used + pen.measureText(bytes).width + 18 < w) {
      pen.fillStyle = colours.faint;
      pen.fillText(bytes, x + 11 + used, y + 4);
    }
  }

  fill({ view, x, y, w, h }) {
    const { pen, colours } = this;
    if (!view.leaf) { this.fillModule(view, x, y, w, h); return; }
    const { leaf } = view;
    const tint = (colour) => mixed(colour, colours.paper, 0.36);
    const { rows, columns } = leaf.faults.length ? { rows: [], columns: [] } : splitting(leaf, this.side);
    const used = [...rows, ...columns].map((axis) => this.axes[axis]);
    [x, y, w, h] = [x + 0.5, y + 0.5, w - 1, h - 1];
    if (w <= 0 || h <= 0) return;
    if (leaf.faults.length) pen.fillStyle = tint(colours.error);
    else if (!used.length) pen.fillStyle = colours.cell;
    else if (new Set(used).size === 1) pen.fillStyle = tint(used[0]);
    else {
      const blend = pen.createLinearGradient(x, y + h, x + w, y);
      used.forEach((colour, i) => blend.addColorStop(i / (used.length - 1), tint(colour)));
      pen.fillStyle = blend;
    }
    pen.fillRect(x, y, w, h);
    if (leaf.group === "whole" && w > 6 && h > 6) this.hatch(x, y, w, h);
    const edge = Math.min(5, Math.floor(Math.min(w, h) / 6));
    if (edge >= 2) {
      // The top edge in equal parts, the left edge below it.
      columns.forEach((axis, i) => { pen.fillStyle = this.axes[axis]; pen.fillRect(x + (i * w) / columns.length, y, w / columns.length, edge); });
      const top = columns.length ? edge : 0;
      rows.forEach((axis, i) => { pen.fillStyle = this.axes[axis]; pen.fillRect(x, y + top + (i * (h - top)) / rows.length, edge, (h - top) / rows.length); });
    }
    this.write(view, x + edge, y + edge, w - edge, h - edge);
  }

  // Leaves too small to be drawn: how much of them is split over what.
  fillModule(view, x, y, w, h) {
    const { pen, colours } = this;
    [x, y, w, h] = [x + 0.5, y + 0.5, w - 1, h - 1];
    if (w <= 0 || h <= 0) return;
    const groups = [...view.node.groups].sort((a, b) => b[1] - a[1]);
    let at = x;
    for (const [name, held] of groups) {
      const wide = (w * held) / (view.node.held || 1);
      const axes = this.byName.get(name).axes.map((axis) => mixed(this.axes[axis], colours.paper, 0.36));
      pen.fillStyle = name === "error" ? mixed(colours.error, colours.paper, 0.36) : colours.cell;
      if (!axes.length) pen.fillRect(at, y, wide, h);
      axes.forEach((colour, i) => { pen.fillStyle = colour; pen.fillRect(at, y + (i * h) / axes.length, wide, h / axes.length); });
      at += wide;
    }
    this.write(view, x, y, w, h);
  }

  hatch(x, y, w, h) {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, w, h);
    pen.clip();
    pen.strokeStyle = mixed(this.colours.whole, this.colours.cell, 0.45);
    pen.lineWidth = 1;
    pen.beginPath();
    for (let at = x - h; at < x + w; at += 9) { pen.moveTo(at, y + h); pen.lineTo(at + h, y); }
    pen.stroke();
    pen.restore();
  }

  // The name in as many lines as fit, its first steps before its last: `up`, not `kernel`.
  write(view, x, y, w, h) {
    const { pen, colours } = this;
    if (w < 26 || h < 15) return;
    pen.font = "600 11px system-ui, sans-serif";
    const fits = (text) => pen.measureText(text).width <= w - 6;
    const steps = this.nameOf(view).split(/(?<=\.)(?![^{]*\})/);
    const lines = [""];
    for (const step of steps) {
      const last = lines.length - 1;
      if (!lines[last] || fits(lines[last] + step)) lines[last] += step;
      else lines.push(step);
    }
    const room = Math.max(1, Math.floor((h - 3) / 13));
    const shown = lines.slice(0, room);
    if (lines.length > room) shown[room - 1] = `${shown[room - 1].replace(/\.$/, "")}…`;
    const text = shown.map((line) => clipped(pen, line, w - 6));
    if (text.some((line) => line.length < 3 && line.endsWith("…"))) return;
    pen.fillStyle = colours.ink;
    text.forEach((line, i) => pen.fillText(line, x + 4, y + 3 + 13 * i));
    pen.font = "11px system-ui, sans-serif";
    const count = view.leaf ? membersOf(view).length : leavesIn(view).length;
    const more = [showBytes(Math.max(0, this.model.weigh(view))), view.leaf && view.leaf.group === "whole" ? `replicated ×${view.leaf.copies}` : "", count > 1 && !view.leaf ? plural(count, "leaf", "leaves") : ""];
    let line = text.length;
    for (const one of more.filter(Boolean)) if (line < room && pen.measureText(one).width <= w - 6) { pen.fillText(one, x + 4, y + 3 + 13 * line); line += 1; }
  }

  // What a title above it says already is left out.
  nameOf(view) {
    let above = view.parent;
    while (above && above !== this.root && !this.titled.has(above)) above = above.parent;
    return above && above.full ? view.full.slice(above.full.length + 1) : view.full;
  }

  // Squarified: rows of areas as near to squares as their order allows.
  place(view, x, y, w, h, depth) {
    if (!depth) this.titled = new Set();
    const weigh = (child) => this.model.weigh(child);
    const children = viewsIn(view).filter((child) => weigh(child) > 0).sort((a, b) => weigh(b) - weigh(a));
    const total = children.reduce((sum, child) => sum + weigh(child), 0);
    if (!total || w < 0.5 || h < 0.5) return;
    const unit = (w * h) / total;
    let from = 0;
    while (from < children.length) {
      const side = Math.min(w, h);
      const first = weigh(children[from]) * unit;
      let to = from + 1;
      let sum = first;
      let worst = worstRatio(first, first, sum, side);
      for (; to < children.length; to++) {
        const area = weigh(children[to]) * unit;
        const next = worstRatio(first, area, sum + area, side);
        if (next > worst) break;
        [sum, worst] = [sum + area, next];
      }
      const thick = sum / side;
      let at = 0;
      for (const child of children.slice(from, to)) {
        const long = (weigh(child) * unit) / thick;
        if (w >= h) this.inside(child, x, y + at, thick, long, depth);
        else this.inside(child, x + at, y, long, thick, depth);
        at += long;
      }
      if (w >= h) [x, w] = [x + thick, w - thick];
      else [y, h] = [y + thick, h - thick];
      from = to;
    }
  }

  // Leaves too small to distinguish are one area: that of their module.
  inside(view, x, y, w, h, depth) {
    this.titled ??= new Set();
    this.rects.set(view, { x, y, w, h });
    if (view.leaf || w < 34 || h < 26) this.areas.push({ view, x, y, w, h });
    else if (depth < 4 && w > 64 && h > 48 && this.isSeveral(view)) {
      this.heads.push({ view, x, y, w, h });
      this.titled.add(view);
      this.place(view, x + 3, y + 19, w - 6, h - 22, depth + 1);
    } else this.place(view, x + 1, y + 1, w - 2, h - 2, depth + 1);
  }

  // A module that is nearly all one leaf needs no title: the leaf is named after both.
  isSeveral(view) {
    const held = viewsIn(view).map((child) => this.model.weigh(child));
    return Math.max(...held) < 0.92 * this.model.weigh(view);
  }

  // The smallest thing at a place: a leaf's area, or the title of a module.
  find(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const holds = (a) => x >= a.x && x < a.x + a.w && y >= a.y && y < a.y + a.h;
    return this.areas.find(holds) || [...this.heads].reverse().find(holds) || null;
  }

  hover(area) {
    const view = area && area.view;
    this.tell(view);
    this.canvas.style.cursor = view ? (view.leaf ? "pointer" : "zoom-in") : "default";
    this.light(view);
    this.model.light(view, "map");
  }

  tell(view) {
    const { leaf } = view || {};
    const count = view && leaf ? membersOf(view).length : 0;
    this.status.textContent = !view ? "" : leaf
      ? `${view.full}  ${showShape(leaf.dtype, leaf.shape)}${count > 1 ? ` ×${count}` : ""}  ${leaf.spec}  ${showBytes(view.node.held)} on each device, ${plural(leaf.copies, "copy", "copies")}`
      : `${view.full}  ${plural(view.node.count, "leaf", "leaves")}  ${showBytes(this.model.weigh(view))} on each device; click to zoom`;
  }

  act(view) {
    if (view.leaf) this.choose(view);
    else { this.zoom(view); this.model.zoom(view, "map"); }
  }

  // The drawn view that a view is, or is in.
  drawn(view) {
    for (let one = view; one; one = one.parent) if (this.rects.has(one)) return one;
    return null;
  }

  light(view) { this.frame(this.glow, view && view !== this.root ? this.drawn(view) : null); }

  mark() {
    const { chosen } = this.model;
    this.frame(this.spot, chosen ? this.drawn(viewOfLeaf(this.model.root, chosen)) : null);
  }

  frame(element, view) {
    element.hidden = !view || !this.rects;
    if (element.hidden) return;
    const { x, y, w, h } = this.rects.get(view);
    element.dataset.view = view.full;
    element.style.cssText = `left:${x}px;top:${y}px;width:${Math.max(3, w)}px;height:${Math.max(3, h)}px`;
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const ordered = [...this.areas].sort((a, b) => this.model.weigh(b.view) - this.model.weigh(a.view));
    const { chosen } = this.model;
    const now = this.now || (chosen && viewOfLeaf(this.model.root, chosen));
    const at = ordered.findIndex((area) => area.view === now);
    if (step) {
      const next = ordered[Math.max(0, Math.min(ordered.length - 1, at + step))];
      if (!next) return;
      this.now = next.view;
      this.hover(next);
    } else if (event.key === "Enter" && at >= 0) this.act(ordered[at].view);
    else if (event.key === "+" && at >= 0) {
      // One level down: the child of the root that the area is in.
      let view = ordered[at].view;
      while (view.parent && view.parent !== this.root) view = view.parent;
      if (!view.leaf) this.act(view);
    } else if ((event.key === "-" || event.key === "−") && this.root.parent) this.act(this.root.parent);
    else return;
    event.preventDefault();
  }
}

function worstRatio(first, last, sum, side) {
  const square = (sum / side) ** 2;
  return Math.max(...[first, last].map((area) => Math.max(square / area, area / square)));
}

// Two colours written as #rrggbb, mixed.
function mixed(one, two, share) {
  const parts = (text) => [1, 3, 5].map((i) => parseInt((text.length === 4 ? `#${[...text.slice(1)].map((c) => c + c).join("")}` : text).slice(i, i + 2), 16));
  const [a, b] = [parts(one), parts(two)];
  return `rgb(${a.map((value, i) => Math.round(value * share + b[i] * (1 - share))).join(",")})`;
}

function clipped(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let cut = text;
  while (cut.length > 1 && pen.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}
