// Two states side by side: what was pinned, and what the controls say now.

const STEP_FIELDS = ["target", "on", "strategy", "batch", "remat", "optimizer", "accumulate", "loss_chunks", "offload", "microbatches"];

function figuresOf({ exact, estimate, compiled, state }) {
  const mine = (one) => (one && !one.error && one.state.query === state.query ? one : null);
  const best = mine(compiled) || mine(estimate) || mine(exact);
  const memory = best ? memoryOf(best) : null;
  const time = mine(compiled) && compiled.side.time ? compiled.side.time : mine(estimate) ? estimate.estimate : null;
  const held = mine(exact) ? exact.side.memory.parts.reduce((n, [, bytes]) => n + bytes, 0) : null;
  const sent = sentByAxis({ compiled: mine(compiled), estimate: mine(estimate) }, state.query);
  return {
    memory: memory && best.label !== "exact" ? [memory.used, best.label] : null, held: held === null ? null : [held, "exact"],
    seconds: time ? [time.seconds, "modelled"] : null, tokens: time && time.tokens_per_second ? [time.tokens_per_second, "modelled"] : null,
    sent: sent ? [sent.rows.reduce((n, [, bytes]) => n + bytes, 0), "modelled"] : null,
    findings: mine(exact) ? [exact.side.findings.length, "exact"] : null, fits: memory ? memory.fits : null,
  };
}

function showPins(place, page) {
  const { pinned } = page;
  if (!pinned) {
    return place.replaceChildren(make("h2", {}, "Nothing is pinned"),
      make("p", {}, "Pin a state, change the controls, and both stand here side by side. "), make("button", { type: "button", onclick: () => page.pin() }, "Pin this state"));
  }
  const now = { ...page.known, state: page.state };
  const [one, two] = [figuresOf(pinned), figuresOf(now)];
  const rows = [
    ["peak memory", "memory", showBytes, true], ["parameters, optimizer, batch", "held", showBytes, true], ["step", "seconds", showSeconds, true],
    ["tokens per second", "tokens", (n) => Math.round(n).toLocaleString("en"), false], ["sent by each device", "sent", showBytes, true], ["findings", "findings", String, true],
  ].map(([name, key, show, less]) => {
    const [a, b] = [one[key], two[key]];
    const ratio = a && b && a[0] ? b[0] / a[0] - 1 : null;
    const share = ratio !== null && Math.abs(ratio) < 0.0005 ? 0 : ratio;
    const better = share === null || !share ? "" : share < 0 === less ? "better" : "worse";
    const cell = (value) => (value ? make("span", {}, show(value[0]), " ", labelOf(value[1])) : "–");
    return [name, cell(a), cell(b), share === null ? "" : make("span", { class: better }, !share ? "the same" : `${share > 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(share && Math.abs(share) < 0.1 ? 1 : 0)}% ${better}`)];
  });
  const word = (figures) => (figures.fits === true ? "fits" : figures.fits === false ? "does not fit" : "–");
  rows.unshift(["does it fit", word(one), word(two), ""]);
  const axes = (state) => Object.entries(state.mesh).map(([name, size]) => `${name}=${size}`).join(",");
  const shown = (state, name) => (name === "rules" ? state.rules.map(([p, s]) => `${p} ${s}`).join("; ") || "none" : String(state[name] || "as given"));
  const choices = [["mesh", axes(pinned.state), axes(page.state)], ...[...STEP_FIELDS, "rules"].map((name) => [name.replace("_", " "), shown(pinned.state, name), shown(page.state, name)])]
    .filter(([, a, b]) => a !== b).map(([name, a, b]) => [name, a, b]);
  const header = ["", "pinned", "now"];
  const moved = movedLeaves(pinned, now);
  place.replaceChildren(
    make("div", { class: "tools" }, make("button", { type: "button", onclick: () => page.load(pinned.state.query) }, "Go back to the pinned state"),
      make("button", { type: "button", onclick: () => page.pin() }, "Pin this state instead"), make("button", { type: "button", onclick: () => page.unpin() }, "Unpin")),
    make("h2", {}, "What changed in the numbers"), table([...header, "change"], rows, { right: [1, 2, 3], label: "Figures compared" }),
    make("h2", {}, "What changed in the choices"), choices.length ? table(header, choices, { label: "Choices compared" }) : make("p", { class: "faint" }, "Nothing: it is the same state."),
    moved.length ? make("h2", {}, `${plural(moved.length, "leaf", "leaves")} with another spec`) : "",
    moved.length ? table(["leaf", "pinned", "now", "bytes on each device"], moved.slice(0, 100), { right: [3], label: "Leaves compared" }) : "");
}

function movedLeaves(pinned, now) {
  if (!pinned.exact || pinned.exact.error || !now.exact || now.exact.error) return [];
  const [one, two] = [readSide(pinned.exact.side, 0), readSide(now.exact.side, 1)];
  const before = new Map(one.leaves.map((leaf) => [leaf.path, leaf]));
  return two.leaves.filter((leaf) => before.has(leaf.path) && before.get(leaf.path).spec !== leaf.spec)
    .map((leaf) => [leaf.path, make("code", {}, before.get(leaf.path).spec), make("code", {}, leaf.spec), `${showBytes(before.get(leaf.path).held)} → ${showBytes(leaf.held)}`]);
}
