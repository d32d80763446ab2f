// Talks to the server: every question carries the token, and the newest answer is the one that counts.

const token = location.hash.slice(1);

async function ask(name, body = {}) {
  let answer;
  try {
    answer = await fetch(`/api/${name}`, {
      method: "POST", headers: { "content-type": "application/json", "x-shardwise-token": token },
      body: JSON.stringify(body), credentials: "omit", referrerPolicy: "no-referrer",
    });
  } catch {
    throw Object.assign(new Error("The studio does not answer: it was stopped. Run its command again, and open the new address."), { gone: true });
  }
  const text = await answer.text();
  let data;
  try { data = JSON.parse(text); } catch { data = { error: text.trim() }; }
  if (!answer.ok) throw new Error(data.error || `status ${answer.status}`);
  return data;
}

// One question at a time; of those that wait, only the newest is asked.
class Newest {
  constructor(name, found, failed) {
    [this.name, this.found, this.failed, this.busy, this.next] = [name, found, failed, false, null];
  }

  ask(body) {
    this.next = body;
    if (!this.busy) this.run();
  }

  async run() {
    this.busy = true;
    while (this.next) {
      const body = this.next;
      this.next = null;
      try {
        const answer = await ask(this.name, body);
        if (!answer.superseded) this.found(answer, body);
      } catch (error) {
        this.failed(error, body);
      }
    }
    this.busy = false;
  }
}

function say(text) { byId("said").textContent = text; }

function alertUser(text) {
  const place = byId("alert");
  place.hidden = !text;
  place.textContent = text || "";
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied`);
  } catch {
    // A frame may not be allowed to: the text is shown, selected.
    const area = make("textarea", { class: "copy-area", rows: 6, "aria-label": what, readonly: true }, text);
    byId("foot").before(area);
    area.select();
    area.addEventListener("blur", () => area.remove());
    say(`Select and copy the ${what}`);
  }
  flash(what);
}

function flash(text) {
  const note = make("div", { class: "flash", "aria-hidden": true }, `${text} copied`);
  document.body.append(note);
  setTimeout(() => note.remove(), 1600);
}

function download(name, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 5000);
}
