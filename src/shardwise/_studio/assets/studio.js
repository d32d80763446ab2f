// The page: one state, its answers, and what keeps them in step.

const page = {
  state: null, query: "", number: 0, edits: [], pinned: null,
  known: { exact: null, estimate: null, compiled: null }, waiting: { exact: false, estimate: false },
  compiling: null, dragging: false, push: false, index: 0, last: 0,
};

// A state's answers that were there before are there at once when one goes back.
const remembered = new Map();
const remember = (kind, answer) => {
  const of = remembered.get(answer.state.query) || {};
  of[kind] = answer;
  remembered.set(answer.state.query, of);
  if (remembered.size > 200) remembered.delete(remembered.keys().next().value);
};

const exact = new Newest("exact", (answer, body) => {
  if (answer.number !== page.number) return;
  if (answer.refused) { refuse(answer.refused); return; }
  page.edits = [];
  page.waiting.exact = false;
  page.known.exact = answer;
  settle(answer.state, body.how);
}, (error, body) => {
  if (error.gone) gone(error);
  else if (body.number === page.number) refuse(error.message);
});

// An edit that leads nowhere: the state stays, and the controls say so.
function refuse(why) {
  Object.assign(page, { edits: [], push: false });
  page.waiting.exact = false;
  alertUser(why);
  if (page.state) { page.query = page.state.query; page.controls.show(page.state); }
  draw();
}

const offers = new Newest("offered", (answer) => {
  if (answer.state.query !== page.query) return;
  page.controls.offered(answer.offered, page.state);
}, (error) => { if (error.gone) gone(error); else alertUser(error.message); });

const estimates = new Newest("estimate", (answer) => {
  remember("estimate", answer);
  if (answer.state.query !== page.query) return;
  page.waiting.estimate = false;
  page.known.estimate = answer;
  draw();
}, (error) => { page.waiting.estimate = false; if (error.gone) gone(error); });

let estimateLater = 0;

// What the controls did: edits gather until an answer to all of them is there.
function edit(change, done) {
  const last = page.edits[page.edits.length - 1];
  if (last && change[0] === "axis" && last[0] === "axis" && last[1] === change[1]) page.edits[page.edits.length - 1] = change;
  else page.edits.push(change);
  // A slider that moves makes one entry of the history, not one for each stop.
  page.push = page.push || !page.dragging;
  page.dragging = !done;
  question(page.state.query, page.edits, "edit");
}

function question(query, edits, how) {
  page.number += 1;
  page.waiting.exact = true;
  page.query = edits.length ? `${query} …` : query;  // an answer to another question is stale
  clearTimeout(estimateLater);
  exact.ask({ state: query, edits: [...edits], number: page.number, how });
  draw(true);
}

// The answer to the newest question: its state is the page's.
function settle(state, how) {
  const same = page.state && page.state.query === state.query;
  [page.state, page.query] = [state, state.query];
  const link = `?${state.query}#${token}`;
  const push = how === "push" || (how === "edit" && page.push);
  page.push = false;
  if (push && !same) { page.index += 1; page.last = page.index; history.pushState({ index: page.index }, "", link); }
  else if (how !== "stay" || !history.state) history.replaceState({ index: page.index }, "", link);
  alertUser("");
  const before = remembered.get(state.query) || {};
  page.known.estimate = before.estimate || page.known.estimate;
  page.known.compiled = before.compiled || page.known.compiled;
  page.controls.show(state);
  page.controls.showBatch(page.known.exact.batch || [], waysOfBatch(state));
  document.title = `${Object.entries(state.mesh).map(([name, size]) => `${name}=${size}`).join(",")} – Shardwise studio`;
  offers.ask({ state: state.query });
  const wanted = !before.estimate && !page.known.exact.error && state.on !== "none";
  page.waiting.estimate = wanted;
  if (wanted) estimateLater = setTimeout(() => estimates.ask({ state: state.query }), page.dragging ? 400 : 120);
  draw();
}

const BATCH_NAMES = ["replica", "data", "dp", "batch", "fsdp", "expert", "pipe"];
const waysOfBatch = (state) => Object.entries(state.mesh).reduce((n, [name, size]) => (BATCH_NAMES.includes(name) ? n * size : n), 1);

function draw(light = false) {
  showFigures(byId("figures"), page.known, page.query, page.waiting, (name) => page.views.choose(name, true));
  byId("figures").setAttribute("aria-busy", page.waiting.exact || page.waiting.estimate);
  document.body.dataset.settled = !page.waiting.exact && !page.waiting.estimate;
  byId("undo").disabled = page.index === 0;
  byId("redo").disabled = page.index >= page.last;
  byId("compile").disabled = !page.state || page.state.on === "none";
  if (page.known.exact) byId("command").textContent = page.known.exact.command;
  byId("command-row").hidden = !(page.known.exact && page.known.exact.command);
  if (!light) page.views.draw();
}

// A state that is known by its link: a point of a search, the pinned one, the browser's history.
page.load = (query, how = "push") => { page.edits = []; page.push = false; question(query, [], how); };
page.pin = () => { page.pinned = { ...page.known, state: page.state }; say("Pinned"); page.views.choose("Pinned", true); };
page.unpin = () => { page.pinned = null; page.views.choose("Pinned"); };

page.compile = async () => {
  const { query } = page.state;
  showTask({ kind: "compile", lines: ["asked"], seconds: 0 });
  try {
    const begun = await ask("compile", { state: query });
    page.compiling = begun.task;
    let lines = [];
    for (;;) {
      const news = await ask("task", { task: begun.task, lines: lines.length });
      if (page.compiling !== begun.task) return;
      lines = [...lines, ...news.lines];
      showTask({ ...news, lines, state: query });
      if (news.done) {
        page.compiling = null;
        if (news.result) {
          remember("compiled", news.result);
          if (news.result.state.query === page.query || !page.known.compiled) page.known.compiled = news.result;
          say("Compiled");
          page.views.drawn = null;
          draw();
        } else say(news.error);
        return;
      }
      await new Promise((next) => setTimeout(next, 300));
    }
  } catch (error) {
    page.compiling = null;
    if (error.gone) gone(error);
    else showTask({ kind: "compile", lines: [], error: error.message, done: true, seconds: 0 });
  }
};

function showTask(task) {
  const place = byId("task");
  place.hidden = false;
  const last = task.lines[task.lines.length - 1] || "";
  const word = !task.done ? "Compiling" : task.error === "cancelled" ? "Cancelled" : task.error ? "Not compiled" : "Compiled";
  place.className = `task ${task.done ? (task.error ? "bad" : "good") : "busy"}`;
  place.replaceChildren(
    make("b", {}, word), make("span", { class: "task-line", role: "status" }, task.done && task.error ? (task.error === "cancelled" ? "" : task.error) : task.done && task.result ? `${task.result.side.name}${task.result.cached ? ", from the cache" : ""}` : last),
    make("span", { class: "faint" }, `${task.seconds.toFixed(1)} s`),
    task.done ? make("button", { type: "button", class: "small", onclick: () => { place.hidden = true; } }, "Close")
      : make("button", { type: "button", class: "small", id: "cancel", onclick: () => page.compiling && ask("cancel", { task: page.compiling }) }, "Cancel"));
}

function gone(error) {
  alertUser(error.message);
  document.body.classList.add("gone");
}

function topBar() {
  const button = (id, text, title, act, more = {}) => make("button", { type: "button", id, title, onclick: act, ...more }, text);
  byId("bar").replaceChildren(
    make("h1", {}, "Shardwise ", make("span", { class: "faint" }, "studio")),
    make("div", { class: "tools", role: "toolbar", "aria-label": "State" },
      button("undo", "Undo", "Undo (Ctrl+Z)", () => history.back()), button("redo", "Redo", "Redo (Ctrl+Shift+Z)", () => history.forward()),
      button("pin", "Pin", "Keep this state beside the next ones", () => page.pin()),
      button("compile", "Compile", "Ask the chips' own compiler", () => page.compile(), { class: "primary" })),
    make("div", { class: "tools", role: "toolbar", "aria-label": "Take it away" },
      button("copy-link", "Link", "Copy a link to this state, for as long as this studio runs", () => copy(location.href, "link")),
      button("copy-command", "Command", "Copy the command line", () => copy(page.known.exact.command, "command")),
      button("copy-python", "Python", "Copy a program", async () => { try { copy((await ask("python", { state: page.state.query })).text, "program"); } catch (error) { alertUser(error.message); } }),
      button("save", "Save layout", "Download the layout, for --layout and sw.load_layout", async () => { try { download("layout.json", (await ask("lockfile", { state: page.state.query })).text); say("Saved"); } catch (error) { alertUser(error.message); } }),
      themeButton(() => { page.views.drawn = null; draw(); })));
  byId("foot").replaceChildren(
    make("p", { id: "command-row", hidden: true }, make("code", { id: "command" })),
    make("p", {}, "exact: arithmetic on shapes. modelled: an estimate. compiled: reported by the chips' own compiler. Stale figures belong to an earlier state."));
}

function keys(event) {
  const inText = /^(INPUT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range" && event.target.type !== "checkbox";
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && !inText) {
    event.preventDefault();
    if (event.shiftKey) { if (page.index < page.last) history.forward(); } else if (page.index > 0) history.back();
  }
  if (event.key === "/" && !inText) {
    event.preventDefault();
    if (page.views.name !== "Model") page.views.choose("Model");
    byId("search").focus();
  }
}

async function begin() {
  let start;
  try { start = await ask("start"); } catch (error) { alertUser(error.message); return; }
  topBar();
  page.controls = new Controls(byId("controls"), start, edit);
  page.explorer = new Explorer(page);
  page.views = new Views(byId("tabs"), byId("view"), page);
  if (!start.command) for (const id of ["copy-command"]) byId(id).hidden = true;
  addEventListener("popstate", (event) => {
    page.index = event.state ? event.state.index : 0;
    page.load(location.search.slice(1), "stay");
  });
  addEventListener("keydown", keys);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { page.views.drawn = null; draw(); });
  setInterval(() => { ask("beat").catch((error) => { if (error.gone) gone(error); }); }, 1000 * start.beat);
  history.replaceState({ index: 0 }, "", location.href);
  page.load(location.search.slice(1) || start.state.query, "replace");
}

begin();
