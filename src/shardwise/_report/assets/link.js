// What is chosen, kept in the address's fragment: a reload or a link shows the same again.

const LINKED = ["view", "at", "leaf", "q", "by", "sort", "fold", "zoom", "tab"];

class Link {
  // `follow(link)` is called when the reader goes back, forward, or to another fragment.
  constructor(follow) {
    // A page inside another one, as in a notebook, has no address of its own.
    this.inside = location.protocol === "about:";
    this.read();
    addEventListener("popstate", () => { this.read(); follow(this); });
  }

  read() {
    const text = this.inside ? "" : location.hash.slice(1);
    // A bare word is a section.
    const values = new URLSearchParams(text && !text.includes("=") ? `at=${text}` : text);
    this.values = Object.fromEntries(LINKED.filter((name) => values.has(name)).map((name) => [name, values.get(name)]));
  }

  get(name) { return this.values[name] || ""; }

  // Empty values are left out; `push` makes an entry in the browser's history.
  set(change, push = false) {
    Object.assign(this.values, change);
    if (this.inside) return;
    const text = LINKED.filter((name) => this.values[name]).map((name) => `${name}=${readable(this.values[name])}`).join("&");
    if (text === location.hash.slice(1)) return;
    history[push ? "pushState" : "replaceState"](null, "", text ? `#${text}` : location.pathname + location.search);
  }
}

const readable = (text) => encodeURIComponent(text).replace(/%(2C|2F|3A|7B|7D|20)/g, (code) => ({ "%2C": ",", "%2F": "/", "%3A": ":", "%7B": "{", "%7D": "}", "%20": "+" })[code]);
