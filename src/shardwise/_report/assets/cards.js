// Cards of one figure each, and the labels that numbers wear.

const LABELS = {
  exact: "arithmetic on shapes", modelled: "an estimate", compiled: "reported by the chips' own compiler", measured: "read from a device",
};

function labelOf(label, stale) {
  if (!label) return "";
  return make("span", { class: `tag ${label}${stale ? " stale" : ""}`, title: stale ? "of an earlier state: its answer is on the way" : LABELS[label] }, stale ? `${label}, stale` : label);
}

const MARKS = { good: "✓", bad: "✗", warn: "!" };

// `big` is what one reads from afar; `mark` puts the sign of its state before it.
function card(id, title, { state = "plain", word, big, unit, second, lines, tag, bar, act, mark, wordy }) {
  return make("article", { class: `card ${state}${wordy ? " wordy" : ""}`, id, "aria-label": title },
    make("header", {}, make("h3", {}, title), tag || ""),
    make("p", { class: "big" }, word ? make("span", { class: "verdict-word" }, word, " ") : "",
      mark && MARKS[state] ? make("span", { class: "mark", "aria-hidden": true }, MARKS[state], " ") : "",
      make("span", { class: "figure" }, big), unit ? make("span", { class: "unit" }, " ", unit) : ""),
    second ? make("p", { class: "second" }, second) : "",
    bar || "",
    ...(lines || []).filter(Boolean).map((line) => make("p", { class: "small-line" }, line)),
    act || "");
}

// `parts` are rows of a name, an amount, what is said of it, and a colour.
function stackBar(parts, most, capacity, label, show = showBytes) {
  const bar = make("div", { class: "stack", role: "img", "aria-label": label }, parts.map(([name, amount, , colour]) => make("span", {
    title: `${name}: ${show(amount)}`, style: `width:${(100 * amount) / most}%;background:var(${colour})`,
  })));
  if (capacity) bar.append(make("i", { class: "limit", style: `left:${Math.min(100, (100 * capacity) / most)}%` }));
  return bar;
}
