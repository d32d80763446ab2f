// What is wrong or suspicious, with what helps.

function findingCount(side, severity) {
  return side.findings.filter((f) => f.severity === severity).reduce((n, f) => n + 1 + f.more.length, 0);
}

function findingsTitle(side) {
  const counts = ["error", "warning"].map((severity) => [findingCount(side, severity), severity]).filter(([count]) => count);
  return counts.length ? `Findings: ${counts.map(([count, severity]) => plural(count, severity)).join(", ")}` : "No findings";
}

function showFindingList(element, side, pickPath) {
  const { findings } = side;
  const known = new Set(side.leaves.map((leaf) => leaf.path));
  const place = (path) => (known.has(path) ? make("button", { type: "button", class: "link", onclick: () => pickPath(path) }, path) : path);
  const entries = findings.map((finding) => make("li", { class: `finding ${finding.severity}` },
    make("div", { class: "finding-head" }, make("span", { class: `severity ${finding.severity}` }, finding.severity),
      make("b", {}, `${finding.code} ${finding.name}`), make("span", {}, place(finding.path))),
    make("div", {}, finding.message), finding.context ? make("code", { class: "context" }, finding.context) : null,
    finding.help ? make("div", { class: "help" }, make("b", {}, "help: "), finding.help) : null,
    finding.more.length ? make("details", {}, make("summary", {}, `and ${finding.more.length} more like it, up to ${finding.more[finding.more.length - 1]}`),
      make("ul", {}, finding.more.slice(0, 200).map((path) => make("li", {}, place(path))))) : null));
  // The first screen says that there are none.
  element.hidden = !findings.length;
  element.replaceChildren(make("h2", { id: "findings-title" }, findingsTitle(side)), make("ul", { class: "findings" }, entries));
}
