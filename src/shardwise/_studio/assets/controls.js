// The controls: each change is an edit of the state, which the server applies and answers.

const FIELD_HELP = {
  remat: "What the backward pass recomputes instead of saving",
  accumulate: "Into how many microbatches the batch is split; their gradients are averaged",
  loss_chunks: "In how many chunks the loss is computed with the output head",
  offload: "What is kept in the memory of the hosts between steps",
  microbatches: "Into how many parts the pipeline splits the batch",
  optimizer: "Replaces the recipe's own, to see what its state takes",
};
const REMAT_NAMES = {
  none: "none: save everything", nothing_saveable: "all: recompute everything",
  dots_with_no_batch_dims_saveable: "dots: save products with weights",
};

class Controls {
  // `edit(edit, done)` changes the state; while `done` is false, a slider still moves.
  constructor(element, begin, edit) {
    [this.begin, this.edit, this.axes] = [begin, edit, new Map()];
    const set = (name) => (value) => edit(["set", name, value], true);
    this.target = selectOf("Model", begin.targets.map((name) => [name, name]), set("target"));
    this.chip = selectOf("Chips", [], (chip) => this.pickChip(chip));
    this.topology = selectOf("How many", [], set("on"));
    this.sliders = make("div", { class: "axes" });
    this.missing = make("p", { class: "hint" });
    this.strategy = selectOf("Strategy", [], set("strategy"));
    this.batch = textOf("Batch", "sequences × tokens, such as 64x2048", set("batch"));
    this.batchHint = make("p", { class: "hint", id: "batch-hint" });
    this.fields = new Map(["remat", "accumulate", "loss_chunks", "offload", "microbatches", "optimizer"].map((name) => [
      name, selectOf(`${name[0].toUpperCase()}${name.slice(1).replace("_", " ")}`, [], set(name), FIELD_HELP[name]),
    ]));
    this.rules = make("div", { class: "rules" });
    element.replaceChildren(
      group("Where", this.target.row, make("div", { class: "pair" }, this.chip.row, this.topology.row)),
      group("Mesh", this.sliders, this.missing),
      group("How it is split", this.strategy.row, this.rules),
      group("Step", this.batch.row, this.batchHint, ...[...this.fields.values()].map((field) => field.row)));
  }

  pickChip(chip) {
    if (chip === "none") this.edit(["set", "on", "none"], true);
    else {
      // The same number of devices where the chip comes so, else the nearest.
      const first = this.now.on === "none" ? `${chip}:` : "";
      this.edit(["set", "on", first ? this.defaultOf(chip) : this.sameOn(chip)], true);
    }
  }

  defaultOf(chip) { return this.offer && TPU_DIMS[chip] ? `${chip}:${TPU_DIMS[chip] === 3 ? "2x2x2" : "2x4"}` : `${chip}:1x8`; }

  sameOn(chip) {
    const devices = this.now.devices;
    const dims = TPU_DIMS[chip];
    if (!dims) return devices >= 8 && devices % 8 === 0 ? `${chip}:${devices / 8}x8` : `${chip}:1x${Math.min(8, devices)}`;
    const shapes = dims === 3
      ? { 1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16" }
      : { 1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16" };
    const chips = chip === "tpu7x" ? devices / 2 : devices;
    const near = Object.keys(shapes).map(Number).reduce((a, b) => (Math.abs(Math.log(b / chips)) < Math.abs(Math.log(a / chips)) ? b : a));
    return `${chip}:${shapes[near]}`;
  }

  show(state) {
    this.now = state;
    this.target.input.value = state.target;
    this.batch.input.value = state.batch;
    this.batch.input.disabled = false;
    for (const name of ["remat", "offload", "optimizer"]) keepOption(this.fields.get(name), state[name]);
    for (const name of ["accumulate", "loss_chunks", "microbatches"]) keepOption(this.fields.get(name), state[name] ? String(state[name]) : "");
    keepOption(this.strategy, state.strategy);
    this.showRules(state.rules);
    for (const [name, axis] of this.axes) {
      const size = state.mesh[name] || 1;
      const at = axis.sizes.indexOf(size);
      if (at >= 0 && document.activeElement !== axis.input) axis.input.value = at;
      axis.say(size);
    }
  }

  showBatch(shapes, ways) {
    const [first] = shapes;
    this.batch.input.placeholder = first ? first.shape.slice(0, 2).join("x") : "";
    this.batch.row.hidden = !shapes.length;
    const samples = first ? first.shape[0] : 0;
    this.batchHint.textContent = samples ? `${samples.toLocaleString("en")} samples, ${Number((samples / ways).toFixed(2))} on each device of the batch's axes` : "";
  }

  // What can be chosen now; the sliders stay the same elements while they are held.
  offered(offer, state) {
    this.offer = offer;
    const [chip] = state.on.split(":");
    this.chip.set(offer.chips.map((name) => [name, name === "none" ? "none: arithmetic only" : name]), chip);
    this.topology.set(offer.topologies.map((one) => [one.on, `${one.on.split(":")[1]} = ${plural(one.devices, "device")}`]), state.on);
    this.topology.row.hidden = chip === "none";
    this.strategy.set(offer.strategies.map((name) => [name, name || "the model's annotations"]), state.strategy);
    const named = (names) => (name) => [name, names[name] || name];
    const fill = (name, values, own) => {
      const field = this.fields.get(name);
      field.row.hidden = !values.length;
      field.set([["", own], ...values], name in { accumulate: 1, loss_chunks: 1, microbatches: 1 } ? (state[name] ? String(state[name]) : "") : state[name]);
    };
    const own = (name, names = {}) => { const value = offer.own[name]; return value === undefined || value === null ? "as given" : `${names[value] || value} (as given)`; };
    fill("remat", offer.remats.map(named(REMAT_NAMES)), own("remat", REMAT_NAMES));
    fill("optimizer", offer.optimizers.map(named({})), "as given");
    fill("offload", offer.offloads.map(named({ none: "nothing" })), own("offload", { none: "nothing" }));
    fill("accumulate", offer.accumulate.map((n) => [String(n), String(n)]), own("accumulate"));
    fill("loss_chunks", offer.chunks.map((n) => [String(n), String(n)]), own("loss_chunks"));
    fill("microbatches", offer.microbatches.map((n) => [String(n), String(n)]), own("microbatches"));
    this.missing.textContent = offer.missing ? `Not offered: ${offer.missing}.` : "";
    const names = offer.axes.map((axis) => axis.name);
    for (const name of this.axes.keys()) if (!names.includes(name)) { this.axes.get(name).row.remove(); this.axes.delete(name); }
    for (const axis of offer.axes) {
      if (!this.axes.has(axis.name)) this.axes.set(axis.name, this.slider(axis.name));
      this.axes.get(axis.name).set(axis);
    }
    const order = names.map((name) => this.axes.get(name).row);
    if (!this.sliders.contains(document.activeElement)) this.sliders.replaceChildren(...order);
    else for (const row of order) if (!row.isConnected) this.sliders.append(row);
  }

  slider(name) {
    const id = `axis-${name}`;
    const input = make("input", { type: "range", id, min: 0, step: 1, "data-axis": name });
    const output = make("output", { for: id });
    const ticks = make("div", { class: "ticks", id: `${id}-ticks` });
    const axis = { sizes: [1], input, row: make("div", { class: "axis-row" }, make("label", { for: id }, name), output, input, ticks) };
    input.setAttribute("aria-describedby", ticks.id);
    axis.say = (size) => {
      output.textContent = size;
      input.setAttribute("aria-valuetext", `${name} = ${size}`);
      for (const tick of ticks.children) tick.classList.toggle("now", Number(tick.dataset.size) === size);
    };
    const move = (done) => {
      const size = axis.sizes[Number(input.value)];
      axis.say(size);
      this.edit(["axis", name, size], done);
    };
    input.addEventListener("input", () => move(false));
    input.addEventListener("change", () => move(true));
    axis.set = (offer) => {
      axis.sizes = offer.stops.map((stop) => stop.size);
      input.max = axis.sizes.length - 1;
      input.disabled = axis.sizes.length < 2;
      if (document.activeElement !== input) input.value = axis.sizes.indexOf(offer.size);
      const all = [...offer.stops, ...offer.closed].sort((a, b) => a.size - b.size);
      ticks.replaceChildren(...all.map((stop) => (stop.why
        ? make("span", { class: "closed", "data-size": stop.size, title: stop.why }, String(stop.size), make("span", { class: "hidden" }, ` not possible: ${stop.why}. `))
        : make("span", { "data-size": stop.size, title: stop.mesh }, String(stop.size)))));
      axis.say(offer.size);
    };
    return axis;
  }

  showRules(rules) {
    if (this.rules.contains(document.activeElement) && JSON.stringify(rules) !== JSON.stringify(this.shownRules)) { /* the new ones are drawn */ }
    else if (JSON.stringify(rules) === JSON.stringify(this.shownRules)) return;
    this.shownRules = rules;
    const put = (next) => this.edit(["rules", next], true);
    const rows = rules.slice(0, 40).map(([pattern, spec], at) => make("div", { class: "rule" },
      make("code", {}, pattern), make("code", {}, spec),
      make("button", { type: "button", class: "small", "aria-label": `Remove the rule ${pattern}`, onclick: () => put(rules.filter((_, i) => i !== at)) }, "×")));
    const pattern = make("input", { type: "text", placeholder: "**.kernel", "aria-label": "Path pattern", size: 10, spellcheck: "false" });
    const spec = make("input", { type: "text", placeholder: "P(None, 'model')", "aria-label": "Spec", size: 12, spellcheck: "false" });
    const add = () => { if (pattern.value && spec.value) put([...rules, [pattern.value.trim(), spec.value.trim()]]); };
    for (const input of [pattern, spec]) input.addEventListener("keydown", (event) => { if (event.key === "Enter") add(); });
    this.rules.replaceChildren(make("details", { open: rules.length > 0 && rules.length < 12 },
      make("summary", {}, rules.length ? plural(rules.length, "rule") : "Rules for single paths"),
      ...rows, rules.length > 40 ? make("p", { class: "hint" }, `and ${rules.length - 40} more`) : "",
      rules.length ? make("button", { type: "button", class: "small", onclick: () => put([]) }, "Remove all") : "",
      make("div", { class: "rule" }, pattern, spec, make("button", { type: "button", class: "small", onclick: add }, "Add"))));
  }
}

const TPU_DIMS = { v4: 3, v5e: 2, v5p: 3, v6e: 2, tpu7x: 3 };

const group = (title, ...rows) => make("section", { class: "control-group" }, make("h2", {}, title), ...rows);

function selectOf(name, options, change, help) {
  const id = `set-${name.toLowerCase().replaceAll(" ", "-")}`;
  const input = make("select", { id, title: help, onchange: () => change(input.value) });
  const field = { input, row: make("div", { class: "field" }, make("label", { for: id }, name), input) };
  field.set = (pairs, value) => {
    const text = JSON.stringify(pairs);
    if (text !== field.text) input.replaceChildren(...pairs.map(([one, shown]) => make("option", { value: one }, shown)));
    field.text = text;
    keepOption(field, value);
  };
  field.set(options, options.length ? options[0][0] : "");
  return field;
}

// A value that came by a link may be none of those that are offered: it is shown all the same.
function keepOption(field, value) {
  if (![...field.input.options].some((option) => option.value === value)) {
    field.input.append(make("option", { value }, value || "default"));
    field.text = "";
  }
  field.input.value = value;
}

function textOf(name, help, change) {
  const id = `set-${name.toLowerCase()}`;
  const input = make("input", { type: "text", id, title: help, inputmode: "text", autocomplete: "off", "aria-describedby": `${name.toLowerCase()}-hint`, onchange: () => change(input.value.trim().replaceAll("×", "x").replaceAll(" ", "")) });
  return { input, row: make("div", { class: "field" }, make("label", { for: id }, name), input) };
}
