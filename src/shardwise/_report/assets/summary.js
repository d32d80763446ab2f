// The first screen: does it fit, how fast is it, what is wrong, what to do; and the largest of everything.

function showSummary(element, side, go) {
  const cards = [fitCard(side), speedCard(side), findingsCard(side, go), adviceCard(side, go)];
  element.replaceChildren(make("h2", { id: "summary-title", class: "hidden" }, "Summary"), make("div", { class: "cards first" }, cards, factRow(side, go)));
}

const usedBytes = (side) => side.memory.parts.reduce((total, [, bytes]) => total + bytes, 0);
const onDevices = (side) => (side.devices > 1 ? `on each of ${side.devices} devices` : "on the device");

function memoryStack(side, most) {
  const { parts, capacity } = side.memory;
  return stackBar(parts.map(([name, bytes, label]) => [name, bytes, label, PART_COLOURS[name] || "--cut4"]), most, capacity,
    `${parts.map(([name, bytes, label]) => `${name} ${showBytes(bytes)} (${label})`).join(", ")}${capacity ? `; a device has ${showBytes(capacity)}` : ""}`);
}

function fitCard(side) {
  const { capacity, whole, parts } = side.memory;
  const { fits, errors, problem } = side.summary;
  const used = usedBytes(side);
  const of = capacity ? `${showBytes(used)} of ${showBytes(capacity)}` : showBytes(used);
  const tag = labelOf(whole ? "compiled" : "exact");
  const bar = parts.length ? memoryStack(side, Math.max(used, capacity || 0) || 1) : "";
  const give = (more) => card("card-fit", "Does it fit?", { tag, bar, ...more });
  const resident = parts.length > 1 ? "Parameters, optimizer and batch" : "The parameters";
  if (errors || problem) return give({ state: "bad", mark: true, big: "Cannot run", second: errors ? `${plural(errors, "error")} in the layout` : problem, lines: [bar && `It would hold ${of} ${onDevices(side)}.`] });
  if (fits === true) return give({ state: "good", mark: true, big: "Fits", second: of, lines: [`${showBytes(capacity - used)} to spare (${showShare(capacity - used, capacity)}) ${onDevices(side)}`] });
  if (fits === false) return give({ state: "bad", mark: true, big: "Does not fit", second: of, lines: [capacity && used > capacity ? `${showBytes(used - capacity)} too much ${onDevices(side)}${whole ? "" : ", before any temporaries"}` : "The compiler ran out of memory."] });
  if (!parts.length) return give({ big: "Not known", tag: "", lines: ["The compiler did not say how much memory the step needs."] });
  if (whole) return give({ big: showBytes(used), second: `needed ${onDevices(side)}`, lines: [`Of ${side.chips || "these devices"} no limit is known, so nothing says whether it fits.`] });
  if (capacity) return give({ big: "Not known", second: `at least ${of}`, lines: [`${resident} ${onDevices(side)}; temporaries come on top, and only compiling tells how much.`] });
  return give({ big: showBytes(used), second: `resident ${onDevices(side)}`, lines: [`${resident}, without temporaries. ${side.chips ? `Of ${side.chips} no limit is known.` : "No chips are named, so there is no limit to fit."}`] });
}

function speedCard(side) {
  const { time, compiled } = side;
  const give = (more) => card("card-speed", "How fast?", more);
  if (!time) {
    return give({ big: "Not known", lines: [compiled
      ? `The time of a step is modelled for GPUs and TPUs, not for ${side.chips || "these devices"}.`
      : "The time of a step is modelled from the compiled program, of GPUs and TPUs."] });
  }
  const parts = Object.entries(time.parts).filter(([, seconds]) => seconds > 0);
  const rate = [time.tokens_per_second ? `${Math.round(time.tokens_per_second).toLocaleString("en")} tokens/s` : null, time.mfu ? `${(100 * time.mfu).toFixed(0)}% MFU` : null].filter(Boolean);
  return give({
    tag: labelOf("modelled"), big: showSeconds(time.seconds), unit: "a step", second: rate.join(" · "),
    bar: stackBar(parts.map(([name, seconds]) => [name, seconds, "", BOUND_COLOURS[name]]), time.seconds, 0,
      `Time of one step: ${parts.map(([name, s]) => `${name} ${showSeconds(s)}`).join(", ")}`, showSeconds),
    lines: [`bound by ${time.bound}, ${showShare(time.parts[time.bound] || 0, time.seconds)} of the step; between ${showSeconds(time.low)} and ${showSeconds(time.high)}`],
  });
}

function findingsCard(side, go) {
  const [errors, warnings] = [findingCount(side, "error"), findingCount(side, "warning")];
  const [first] = [...side.findings].sort((a, b) => (a.severity === "error" ? 0 : 1) - (b.severity === "error" ? 0 : 1));
  const compiled = side.compiled !== null;
  return card("card-wrong", "What is wrong?", {
    state: errors ? "bad" : warnings ? "warn" : "plain", tag: labelOf(compiled ? "compiled" : "exact"),
    big: errors ? plural(errors, "error") : warnings ? plural(warnings, "warning") : "No findings",
    second: errors && warnings ? plural(warnings, "warning") : first ? `${first.code} ${first.name}` : "",
    lines: [first ? `${first.path}: ${first.message}` : compiled ? "The layout and the compiled step were checked." : "The layout was checked; a compiled step may have findings of its own."],
    act: first ? make("button", { type: "button", class: "link", onclick: () => go({ at: "findings" }) }, "All findings, with help") : "",
  });
}

function adviceCard(side, go) {
  const [first, ...others] = side.summary.advice;
  const linked = (row, text) => (Object.keys(row.to).length ? make("button", { type: "button", class: "link", onclick: () => go(row.to) }, text) : make("b", {}, text));
  if (!first) return card("card-do", "What to do?", { big: "Nothing", lines: ["No finding, no large waste, and nothing that one part of the step would gain."] });
  const parts = (row) => [` ${row.text} `, labelOf(row.label), row.command ? commandOf(row.command) : ""];
  return card("card-do", "What to do?", {
    state: first.head.startsWith("Fix") || first.head === "Make it run" ? "bad" : "plain", big: linked(first, first.head),
    lines: [make("span", {}, parts(first))],
    act: others.length ? make("ul", { class: "then" }, others.map((row) => make("li", {}, linked(row, row.head), parts(row)))) : "",
  });
}

// A command breaks between its words, not within `--on`.
function commandOf(text) {
  return make("code", { class: "command" }, text.split(" ").flatMap((word, i) => [i ? " " : "", word.length < 28 ? make("span", { class: "word" }, word) : word]));
}

function factRow(side, go) {
  const { facts } = side.summary;
  if (!facts.length) return "";
  return make("dl", { class: "facts", "aria-label": "The largest of everything" }, facts.map((fact) => make("div", { class: "fact" },
    make("dt", {}, fact.name),
    make("dd", {}, make("button", { type: "button", class: "link", onclick: () => go(fact.to) }, fact.value), " ", labelOf(fact.label), make("p", {}, fact.text)))));
}
