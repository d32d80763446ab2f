// The four figures that one reads first. Each wears its label, and says when it is of an older state.

// What is known, best first: [label, memory, stale]; answers of other states come last.
function bestOf(known, query) {
  const order = ["compiled", "estimate", "exact"].map((kind) => known[kind]).filter((one) => one && !one.error);
  return order.find((one) => one.state.query === query) || order.find((one) => one.label !== "exact") || order[0] || null;
}

function memoryOf(answer) {
  if (answer.label === "modelled") {
    const { peak_bytes: peak, capacity, fits, state_bytes: state } = answer.estimate;
    return { used: peak, capacity, fits, parts: [["parameters, optimizer and batch", state, "exact", "--cut0"], ["temporaries", Math.max(0, peak - state), "modelled", "--cut3"]] };
  }
  const { parts, capacity } = answer.side.memory;
  const used = parts.reduce((total, [, bytes]) => total + bytes, 0);
  const fits = answer.label === "compiled" ? answer.fits : capacity && used > capacity ? false : null;
  return { used: answer.peak_bytes || used, capacity, fits, parts: parts.map(([name, bytes, label]) => [name, bytes, label, PART_COLOURS[name]]) };
}

function showFigures(element, known, query, waiting, go) {
  element.replaceChildren(memoryCard(known, query, waiting), timeCard(known, query, waiting, go), wrongCard(known, query, go), sentCard(known, query, go));
}

function memoryCard(known, query) {
  const answer = bestOf(known, query);
  if (!answer) return card("card-memory", "Device memory", { big: "…", lines: [known.exact && known.exact.error] });
  const stale = answer.state.query !== query;
  const { used, capacity, fits, parts } = memoryOf(answer);
  const word = fits === true ? "Fits" : fits === false ? "Does not fit" : answer.label === "modelled" ? "May fit" : capacity ? "At least" : "Holds";
  const most = Math.max(used, capacity || 0) || 1;
  const free = capacity ? capacity - used : 0;
  const lines = [
    answer.label === "exact" ? "Parameters, optimizer and batch; temporaries come on top." : null,
    answer.label !== "exact" ? parts.filter(([name]) => name !== "temporaries").length && `${showBytes(parts.filter(([name]) => name !== "temporaries").reduce((n, [, b]) => n + b, 0))} stay between steps, ${showBytes(parts.filter(([name]) => name === "temporaries").reduce((n, [, b]) => n + b, 0))} are temporary` : null,
    capacity ? (free >= 0 ? `${showBytes(free)} to spare, ${showShare(used, capacity)} used` : `${showBytes(-free)} too much`) : null,
  ];
  return card("card-memory", "Device memory", {
    state: stale ? "stale" : fits === true ? "good" : fits === false ? "bad" : "plain", word, big: showBytes(used), unit: capacity ? `of ${showBytes(capacity)}` : "",
    tag: labelOf(answer.label, stale), lines,
    bar: stackBar(parts, most, capacity, parts.map(([name, bytes, label]) => `${name} ${showBytes(bytes)} (${label})`).join(", ")),
  });
}

function timeCard(known, query, waiting, go) {
  const { estimate, compiled } = known;
  const title = "Step time";
  const has = (one) => one && !one.error && one.state.query === query;
  const timed = compiled && !compiled.error && compiled.side.time;
  const use = has(compiled) && timed ? compiled : has(estimate) ? estimate : estimate && !estimate.error ? estimate : timed ? compiled : null;
  if (estimate && estimate.error && estimate.state.query === query && !(use && use === compiled)) return card("card-time", title, { big: "–", lines: [estimate.error] });
  if (!use) return card("card-time", title, { big: waiting.estimate ? "…" : "–", lines: [waiting.estimate ? "partitioning the step" : "Choose chips, and the step is estimated."] });
  const stale = use.state.query !== query;
  const time = use.label === "compiled" ? use.side.time : use.estimate;
  const parts = Object.entries(time.parts).filter(([, seconds]) => seconds > 0).map(([name, seconds]) => [name, seconds, "", BOUND_COLOURS[name] || "--cut4"]);
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const bar = make("div", { class: "stack", role: "img", "aria-label": parts.map(([name, s]) => `${name} ${showSeconds(s)}`).join(", ") },
    parts.map(([name, s, , colour]) => make("span", { title: `${name}: ${showSeconds(s)}`, style: `width:${(100 * s) / total}%;background:var(${colour})` })));
  const largest = parts.reduce((a, b) => (b[1] > a[1] ? b : a), ["", 0]);
  const tag = labelOf("modelled", stale);
  return card("card-time", title, {
    state: stale ? "stale" : "plain", big: showSeconds(time.seconds), bar, tag,
    lines: [
      [time.low ? `${showSeconds(time.low)} to ${showSeconds(time.high)}` : null, time.tokens_per_second ? `${Math.round(time.tokens_per_second).toLocaleString("en")} tokens/s` : null, time.mfu ? `MFU ${(100 * time.mfu).toFixed(0)}%` : null].filter(Boolean).join(" · "),
      largest[0] ? `mostly ${largest[0]}, ${showShare(largest[1], total)}${use.label === "compiled" ? "; of the compiled program" : ""}` : null,
    ],
    act: make("button", { type: "button", class: "link", onclick: () => go("Time") }, "where it goes"),
  });
}

function wrongCard(known, query, go) {
  const { exact, compiled } = known;
  const title = "What is wrong";
  if (!exact) return card("card-wrong", title, { big: "…" });
  const stale = exact.state.query !== query;
  if (exact.error) return card("card-wrong", title, { state: "bad", big: "Cannot be laid out", lines: [exact.error], tag: labelOf("exact", stale) });
  const proved = compiled && !compiled.error && compiled.state.query === query;
  const side = proved ? compiled.side : exact.side;
  const count = (severity) => side.findings.filter((f) => f.severity === severity).reduce((n, f) => n + 1 + f.more.length, 0);
  const [errors, warnings] = [count("error"), count("warning")];
  const big = exact.problem ? "Cannot run" : errors ? plural(errors, "error") : warnings ? plural(warnings, "warning") : "Nothing found";
  const [first] = side.findings;
  return card("card-wrong", title, {
    state: stale ? "stale" : errors || exact.problem ? "bad" : warnings ? "warn" : "good", big, tag: labelOf(proved ? "compiled" : "exact", stale),
    lines: [exact.problem || (first ? `${first.code} ${first.name}: ${first.path}` : proved ? "No findings of the layout or of the compiled program." : "No findings of the layout; a compilation may have more.")],
    act: side.findings.length ? make("button", { type: "button", class: "link", onclick: () => go("Findings") }, "all findings, with help") : "",
  });
}

function sentByAxis(known, query) {
  const { compiled, estimate } = known;
  if (compiled && !compiled.error && compiled.state.query === query && compiled.side.compiled) {
    const found = {};
    for (const row of collectivesOf(compiled.side)) found[over(row)] = (found[over(row)] || 0) + row.bytes;
    return { rows: Object.entries(found), stale: false, from: "of the compiled program" };
  }
  if (!estimate || estimate.error) return null;
  const rows = Object.entries(estimate.estimate.by_axis).map(([axes, kinds]) => [axes, Object.values(kinds).reduce((n, kind) => n + kind.bytes, 0)]);
  return { rows, stale: estimate.state.query !== query, from: "" };
}

function sentCard(known, query, go) {
  const title = "Sent per device";
  const found = sentByAxis(known, query);
  if (!found) return card("card-sent", title, { big: "–", lines: ["Known once a step is estimated."] });
  const rows = found.rows.filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  const total = rows.reduce((sum, [, bytes]) => sum + bytes, 0);
  return card("card-sent", title, {
    state: found.stale ? "stale" : "plain", big: total ? showBytes(total) : "Nothing", unit: total ? "a step" : "",
    tag: labelOf("modelled", found.stale),
    bar: total ? stackBar(rows.map(([axes, bytes], i) => [axes, bytes, "", `--cut${i % 6}`]), total, 0, rows.map(([axes, bytes]) => `${axes} ${showBytes(bytes)}`).join(", ")) : "",
    lines: [...rows.slice(0, 2).map(([axes, bytes]) => `over ${axes}: ${showBytes(bytes)}`), found.from],
    act: make("button", { type: "button", class: "link", onclick: () => go("Collectives") }, "by axis and line"),
  });
}
