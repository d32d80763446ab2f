// Functions that create elements, and a list that holds only the visible rows.

function make(tag, given = {}, ...children) {
  const svg = ["svg", "g", "rect", "circle", "line", "path", "text", "title"].includes(tag);
  const element = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    const spoken = name.startsWith("aria-");
    if (value === undefined || value === null || (value === false && !spoken)) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else element.setAttribute(name, value === true && !spoken ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// A long text, shortened; the full text is its tooltip. Of operations that the compiler made one, the first.
function short(text) {
  if (text.length <= 40) return text;
  const [first, ...others] = /^\(.*:.*\)$/.test(text) ? text.slice(1, -1).split(":") : [text];
  const cut = first.length > 32 ? `${first.slice(0, 31)}…` : first;
  return make("span", { title: text }, others.length ? `${cut} and ${others.length} more` : cut);
}

const byId = (id) => document.getElementById(id);
const listed = (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}` : names[0] || "");
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A long name may break after what separates its parts, and nowhere else.
function breakable(text) {
  const parts = text.length > 18 ? text.split(/(?<=[,/._:])/) : [text];
  return parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
}

// On a phone, a table of many columns has its rows stacked, each cell after its column's name.
function table(header, rows, given = {}) {
  const right = given.right || [];
  const style = (i) => [right.includes(i) ? "right" : "", (given.roomy || []).includes(i) ? "roomy" : ""].join(" ").trim() || null;
  const nameOf = (value) => (typeof value === "string" ? value : "");
  const head = header.map((value, i) => make("th", { class: style(i), scope: "col", role: "columnheader" }, value));
  const body = rows.map((row) => make("tr", { role: "row" }, row.map((value, i) =>
    make("td", { class: style(i), role: "cell", "data-name": i ? nameOf(header[i]) || null : null }, typeof value === "string" ? breakable(value) : value))));
  const whole = make("table", { role: "table", class: header.length > 3 ? "stacks" : null },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, head)), make("tbody", { role: "rowgroup" }, body));
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": given.label }, whole);
}

// Tabs that the arrow keys go through; `views` are pairs of a name and what shows it.
function tabList(id, label, views) {
  const tabs = views.map(([name]) => make("button", {
    type: "button", role: "tab", id: `${id}-${name.replace(" ", "-")}`, onclick: () => choose(name),
    onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(tabs.indexOf(event.currentTarget) + step + tabs.length) % tabs.length];
      next.click();
      next.focus();
    },
  }, name));
  const choose = (name) => {
    tabs.forEach((tab) => { tab.setAttribute("aria-selected", tab.textContent === name); tab.tabIndex = tab.textContent === name ? 0 : -1; });
    views.find(([one]) => one === name)[1]();
  };
  if (views.length) choose(views[0][0]);
  return make("div", { role: "tablist", class: "tabs", "aria-label": label }, tabs);
}

// A list of rows of equal height: ten thousand of them cost no more than those in view.
class RowList {
  // `draw(row, index)` returns the element of a row.
  constructor(element, draw, given = {}) {
    this.element = element;
    this.draw = draw;
    // Where there is little room, a row has two lines.
    const narrow = matchMedia("(max-width: 700px)");
    const fit = () => { this.height = narrow.matches && given.narrow ? given.narrow : given.height || 28; };
    fit();
    narrow.addEventListener("change", () => { fit(); this.show(true); });
    this.rows = [];
    this.space = make("div", { class: "space", role: "presentation" });
    this.sight = make("div", { class: "sight", role: "presentation" });
    this.space.append(this.sight);
    element.append(this.space);
    element.addEventListener("scroll", () => this.show(), { passive: true });
    addEventListener("resize", () => this.show(true));
    // Paper does not scroll: print all rows, up to a limit.
    addEventListener("beforeprint", () => { this.printing = true; this.show(true); });
    addEventListener("afterprint", () => { this.printing = false; this.show(true); });
  }

  set(rows) {
    this.rows = rows;
    this.show(true);
  }

  show(anew = false) {
    const { element, height, rows } = this;
    const margin = 10;
    // First: the list is as high as its rows, up to a limit.
    this.space.style.height = `${(this.printing ? Math.min(rows.length, 2000) : rows.length) * height}px`;
    let from = Math.max(0, Math.floor(element.scrollTop / height) - margin);
    let to = Math.min(rows.length, Math.ceil((element.scrollTop + element.clientHeight) / height) + margin);
    if (this.printing) [from, to] = [0, Math.min(rows.length, 2000)];
    if (!anew && from === this.from && to === this.to) return;
    [this.from, this.to] = [from, to];
    this.sight.style.transform = `translateY(${from * height}px)`;
    this.sight.replaceChildren(...rows.slice(from, to).map((row, i) => this.draw(row, from + i)));
  }

  reveal(index) {
    // A header above the rows stays in view and takes up space.
    const top = index * this.height;
    const head = this.space.offsetTop - this.element.offsetTop;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.height + head > scrollTop + clientHeight) this.element.scrollTop = top + this.height + head - clientHeight + 2;
    this.show(true);
  }
}
