// The model by bytes per device: each leaf an area, modules side by side, colours as in the tree.

class Treemap {
  constructor(element, side, { pickLeaf, scale = 1, label }) {
    Object.assign(this, { side, pickLeaf, scale });
    this.root = side.tree;
    this.canvas = make("canvas", { tabindex: 0, role: "img" });
    this.crumbs = make("div", { class: "crumbs" });
    this.status = make("p", { class: "status", role: "status" }, "");
    element.replaceChildren(this.crumbs, this.canvas, this.status);
    this.canvas.setAttribute("aria-label", this.describe(label));
    this.canvas.addEventListener("mousemove", (event) => this.hover(this.find(event)));
    this.canvas.addEventListener("mouseleave", () => this.hover(null));
    this.canvas.addEventListener("click", (event) => {
      const area = this.find(event);
      if (area) this.pick(area.node.leaf);
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.zoom(this.root);
  }

  describe(label) {
    const summary = this.side.groups.map((g) => `${g.name === "whole" ? "replicated" : g.name}: ${showBytes(g.held)} in ${plural(g.count, "leaf", "leaves")}`);
    return `${label || "Bytes on each device, by leaf"}. ${summary.join("; ")}. Arrow keys go through the leaves, largest first; Enter shows one.`;
  }

  zoom(node) {
    this.root = node;
    const crumbs = [];
    for (let one = node; one; one = one.parent) {
      const target = one;
      crumbs.unshift(make("button", { type: "button", onclick: () => this.zoom(target) }, one.name || "the model"));
    }
    crumbs.push(make("span", { class: "faint" }, ` ${showBytes(node.held)} on each device`));
    this.crumbs.replaceChildren(...crumbs);
    this.draw();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const height = Math.round(Math.max(220, Math.min(460, width * 0.62)) * this.scale);
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const colours = Object.fromEntries(this.side.groups.map((g) => [g.name, colourOf(g.colour)]));
    this.paper = colourOf("--paper");
    this.areas = [];
    this.titles = [];
    if (this.root.leaf) this.areas.push({ node: this.root, x: 0, y: 0, w: width, h: height });
    else this.place(this.root, 0, 0, width, height, 0);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "top";
    for (const area of this.areas) this.fill(pen, area, colours[area.node.leaf.group]);
    for (const title of this.titles) {
      pen.fillStyle = colourOf("--ink");
      pen.fillText(clipped(pen, title.text, title.w - 6), title.x + 3, title.y + 2);
    }
    this.mark(pen);
  }

  fill(pen, { node, x, y, w, h }, colour) {
    pen.fillStyle = colour;
    pen.fillRect(x, y, w, h);
    if (node.leaf.group === "whole" && w > 3 && h > 3) {
      pen.save();
      pen.beginPath();
      pen.rect(x, y, w, h);
      pen.clip();
      pen.strokeStyle = "rgba(255,255,255,.35)";
      pen.lineWidth = 2;
      pen.beginPath();
      for (let at = x - h; at < x + w; at += 8) { pen.moveTo(at, y + h); pen.lineTo(at + h, y); }
      pen.stroke();
      pen.restore();
    }
    pen.strokeStyle = this.paper;
    pen.lineWidth = 1;
    if (w > 2 && h > 2) pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    if (w > 46 && h > 15) {
      pen.fillStyle = "#fff";
      const name = node.leaf.path.slice(this.root.path ? this.root.path.length + 1 : 0);
      pen.fillText(ending(pen, name, w - 8), x + 4, y + 4);
      if (h > 30) pen.fillText(clipped(pen, showBytes(node.held), w - 8), x + 4, y + 17);
    }
  }

  // Squarified: rows of areas as near to squares as their order allows.
  place(node, x, y, w, h, depth) {
    const children = node.children.filter((child) => child.held > 0).sort((a, b) => b.held - a.held);
    const total = children.reduce((sum, child) => sum + child.held, 0);
    if (!total || w < 1 || h < 1) return;
    const unit = (w * h) / total;
    let rest = children;
    while (rest.length) {
      const side = Math.min(w, h);
      let row = [rest[0]];
      let sum = rest[0].held * unit;
      let worst = worstRatio(row, sum, side, unit);
      for (const child of rest.slice(1)) {
        const more = sum + child.held * unit;
        const next = worstRatio([...row.slice(0, 1), child], more, side, unit);
        if (next > worst) break;
        row.push(child);
        [sum, worst] = [more, next];
      }
      const thick = sum / side;
      let at = 0;
      for (const child of row) {
        const long = (child.held * unit) / thick;
        if (w >= h) this.inside(child, x, y + at, thick, long, depth);
        else this.inside(child, x + at, y, long, thick, depth);
        at += long;
      }
      if (w >= h) [x, w] = [x + thick, w - thick];
      else [y, h] = [y + thick, h - thick];
      rest = rest.slice(row.length);
    }
  }

  inside(node, x, y, w, h, depth) {
    if (node.leaf) { this.areas.push({ node, x, y, w, h }); return; }
    // A module has a line for its name where there is room.
    if (depth < 2 && w > 60 && h > 40) {
      this.titles.push({ text: `${node.name}  ${showBytes(node.held)}`, x, y, w });
      this.place(node, x + 1, y + 15, w - 2, h - 16, depth + 1);
    } else if (w > 8 && h > 8) this.place(node, x + 0.5, y + 0.5, w - 1, h - 1, depth + 1);
    else this.place(node, x, y, w, h, depth + 1);
  }

  find(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    return this.areas.find((a) => x >= a.x && x < a.x + a.w && y >= a.y && y < a.y + a.h) || null;
  }

  hover(area) {
    const leaf = area && area.node.leaf;
    this.status.textContent = leaf
      ? `${leaf.path}  ${showShape(leaf.dtype, leaf.shape)}  ${leaf.spec}  ${showBytes(leaf.held)} on each device, ${plural(leaf.copies, "copy", "copies")}`
      : "";
    this.canvas.style.cursor = leaf ? "pointer" : "default";
  }

  pick(leaf) {
    this.chosen = leaf;
    this.draw();
    this.pickLeaf(leaf);
  }

  mark(pen) {
    const area = this.areas.find((one) => one.node.leaf === this.chosen);
    if (!area) return;
    pen.strokeStyle = colourOf("--ink");
    pen.lineWidth = 3;
    pen.strokeRect(area.x + 1.5, area.y + 1.5, Math.max(1, area.w - 3), Math.max(1, area.h - 3));
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const ordered = [...this.areas].sort((a, b) => b.node.held - a.node.held);
    if (step) {
      const at = ordered.findIndex((area) => area.node.leaf === this.chosen);
      const next = ordered[Math.max(0, Math.min(ordered.length - 1, at + step))];
      if (!next) return;
      this.chosen = next.node.leaf;
      this.draw();
      this.hover(next);
    } else if (event.key === "Enter" && this.chosen) this.pickLeaf(this.chosen);
    else return;
    event.preventDefault();
  }
}

function worstRatio(ends, sum, side, unit) {
  const areas = [ends[0].held * unit, ends[ends.length - 1].held * unit];
  const square = (sum / side) ** 2;
  return Math.max(...areas.map((area) => Math.max(square / area, area / square)));
}

// The end of a path tells leaves apart: what stands before it goes first.
function ending(pen, path, width) {
  const steps = path.split(".");
  while (steps.length > 1 && pen.measureText(steps.join(".")).width > width) steps.shift();
  return clipped(pen, steps.join("."), width);
}

function clipped(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let cut = text;
  while (cut.length > 1 && pen.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}
