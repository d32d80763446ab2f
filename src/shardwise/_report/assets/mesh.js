// The mesh as the hardware is wired, what each axis carries, and everything that one device holds.

function showMesh(element, side, pickLeaf) {
  const axes = side.mesh.map(([axis, size]) => `${axis}=${size}`).join(",");
  const list = make("div", { class: "held", tabindex: 0, role: "list", "aria-label": "What the device holds" });
  const title = make("h3", { id: "device-title", "aria-live": "polite" });
  const talks = make("ul", { class: "talks", "aria-label": "Whom the device talks to" });
  let [chosen, lit] = [0, null];
  const held = side.leaves.reduce((total, leaf) => total + leaf.held, 0);
  const traffic = axisTraffic(side);
  const rows = new RowList(list, (leaf) => make("div", { class: "row", role: "listitem" },
    make("button", { type: "button", class: "link name", onclick: () => pickLeaf(leaf) }, leaf.path),
    make("span", { class: "slice" }, leaf.faults.length ? "cannot be split this way" : showSlice(sliceOf(side, leaf, chosen))),
    make("span", { class: "right" }, showBytes(leaf.held)),
    make("span", { class: "right faint" }, leaf.copies > 1 ? `one of ${leaf.copies}` : leaf.copies ? "only copy" : "")));
  const wiring = new Wiring(side, { label: `The mesh ${axes}`, pick: (device) => { chosen = device; show(); } });
  const keys = traffic.map((one) => make("button", {
    type: "button", class: "axis-key", "aria-pressed": false, style: `--c:${one.colour}`, onclick: () => { lit = lit === one ? null : one; show(); },
  }, make("b", {}, one.axes.map((axis) => `${side.axes[axis]}=${side.sizes[axis]}`).join(" × ")),
  side.compiled ? showBytes(one.bytes) : "", make("span", {}, axisReach(side, one))));
  const show = () => {
    title.textContent = `${showDevice(side, chosen)}: ${plural(side.leaves.length, "leaf", "leaves")}, ${showBytes(held)} (exact)`;
    keys.forEach((key, i) => key.setAttribute("aria-pressed", traffic[i] === lit));
    talks.replaceChildren(...traffic.map((one) => talkOf(side, one, chosen)));
    wiring.show(chosen, lit);
    rows.set(side.leaves);
  };
  element.replaceChildren(
    make("h2", { id: "mesh-title" }, `The mesh: ${axes}${side.chips ? ` on ${side.chips}` : ""}`),
    make("p", { class: "faint" }, `${hardwareSentence(side)} ${side.devices > 1 ? "Lines have the colour of their axis. Choose an axis to light its links and groups, or a device to see what it holds and whom it talks to." : ""}`),
    make("div", { class: "axis-keys", role: "group", "aria-label": "Axes, with the bytes that one device sends over each in a step" }, keys),
    make("div", { class: `hardware${side.devices > 64 ? " large" : ""}` }, wiring.element, make("div", {}, title, talks, list)));
  show();
}

// How far an axis reaches, and how much of its traffic leaves a host or a slice.
function axisReach(side, one) {
  const where = one.spans > 1 ? `spans ${boxWord(side, one.spans)}` : side.hardware.boxes > 1 ? `inside ${side.hardware.kind === "tpu" ? "a slice" : "a host"}` : "";
  if (!side.compiled) return where || "not compiled";
  const sent = one.bytes ? `sent by each device (modelled)${where ? `, ${where}` : ""}` : `nothing sent${where ? `, ${where}` : ""}`;
  return one.crossing && one.crossing < one.bytes ? `${sent}; ${showBytes(one.crossing)} of it crosses` : sent;
}

function talkOf(side, one, chosen) {
  const mates = groupOfAxes(side, chosen, one.axes).filter((device) => device !== chosen);
  const spans = boxesOf(side, [chosen, ...mates]);
  const names = mates.length > 8 ? `${mates.slice(0, 6).join(", ")}, … ${mates[mates.length - 1]}` : mates.join(", ");
  const kinds = [...one.kinds].map(([kind, times]) => `${times.toLocaleString("en")} ${kind}`).join(", ");
  const far = spans > 1 ? ` on ${boxWord(side, spans)}` : side.hardware.boxes > 1 ? ` of its ${side.hardware.kind === "tpu" ? "slice" : "host"}` : "";
  return make("li", { style: `--c:${one.colour}` },
    make("b", {}, one.name), ` with ${plural(mates.length, "device")}${far}: ${names}`,
    side.compiled ? make("div", { class: "faint" }, one.bytes ? `sends ${showBytes(one.bytes)} in a step (modelled): ${kinds}` : "sends nothing") : null);
}
