"""The studio as a process, in a real browser: what it shows is what the library and the compiler say."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import browser as browsers
import forked
import pytest

import shardwise as sw
from shardwise._base import show_bytes, show_seconds
from shardwise._cli.published import StepOptions, load_step
from shardwise._cli.target import load_target
from shardwise._compile import plan_of
from shardwise._studio.state import parse_query

TARGET = "shardwise.examples.text:recipe"
PICTURES = Path(__file__).parents[2] / ".screenshots"


@pytest.fixture(scope="module")
def browser():
    with browsers.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def address():
    """The address of a studio that runs as users start it."""
    command = [sys.executable, "-m", "shardwise", "studio", TARGET, "--on", "h100:1x8", "--no-open"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "shardwise: interrupted" in process.stderr.read()


def ask(address, name, host=None, token=None, method="POST", path=None, **given):
    """Returns the status, the headers and the text of an answer to a request by hand."""
    found = re.fullmatch(r"http://(127\.0\.0\.1):(\d+)/\?(.*)#(.*)", address)
    headers = {"Host": host or f"127.0.0.1:{found[2]}", "X-Shardwise-Token": token or found[4]}
    if token == "":
        del headers["X-Shardwise-Token"]
    headers |= given.pop("headers", {})
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", int(found[2]), timeout=60)
    ) as line:
        line.request(method, path or f"/api/{name}", json.dumps(given), headers)
        answer = line.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def answer(address, name, **given):
    status, _, text = ask(address, name, **given)
    assert status == 200, text
    return json.loads(text)


def query_of(address):
    return address.partition("?")[2].partition("#")[0]


# --- who is answered -------------------------------------------------------------------------------


def test_nobody_else_is_answered(address):
    assert ask(address, "start", token="")[0] == 403
    assert ask(address, "start", token="a" * 32)[0] == 403
    assert ask(address, "start", host="evil.example")[0] == 403
    assert ask(address, "start", headers={"Origin": "https://evil.example"})[0] == 403
    assert ask(address, "start", headers={"Origin": "null"})[0] == 403
    assert ask(address, "start", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert ask(address, "start", method="GET")[0] == 405
    for path in (
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/server.py",
        "/api/nothing",
    ):
        assert ask(address, "", path=path, method="GET")[0] in (403, 404), path
    assert ask(address, "exact", state="x" * 70_000)[0] == 413
    assert ask(address, "exact", state="target=/etc/passwd:x&on=none&mesh=data=2")[0] == 200
    found = answer(address, "exact", state="target=/etc/passwd:x&on=none&mesh=data=2")
    assert "is not one that this studio was opened on" in found["error"]
    status, _, text = ask(address, "exact", state="target=x")
    assert (status, json.loads(text)) == (400, {"error": "the state has no on"})


def test_the_page_is_served_strictly(address):
    status, headers, text = ask(address, "", method="GET", path="/", token="")
    assert status == 200 and address.partition("#")[2] not in text
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy and headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"


def test_it_listens_on_the_loopback_interface_alone(address):
    port = int(re.search(r":(\d+)/", address)[1])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    hosts = {
        row[1].partition(":")[0]
        for row in listening
        if int(row[1].partition(":")[2], 16) == port and row[3] == "0A"
    }
    assert hosts == {"0100007F"}


# --- the page --------------------------------------------------------------------------------------


@pytest.fixture
def open_page(browser, address):
    """Opens the studio; what the browser complains about fails the test, and so does any other host."""
    pages = []

    def opened(query=None, **how):
        page = browser.new_page(**{"viewport": {"width": 1400, "height": 900}, **how})
        told = []
        page.on("console", lambda one: told.append(one.text) if one.type != "log" else None)
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on(
            "request",
            lambda one: (
                told.append(one.url)
                if "//127.0.0.1:" not in one.url and not one.url.startswith("blob:")
                else None
            ),
        )
        page.set_default_timeout(60_000)
        base, token = address.partition("?")[0], address.partition("#")[2]
        page.goto(f"{base}?{query or query_of(address)}#{token}")
        pages.append((page, told))
        settled(page)
        page.wait_for_selector("#axis-data")
        return page

    yield opened
    for page, told in pages:
        page.close()
        assert told == [], told


def settled(page):
    page.wait_for_selector("body[data-settled=true]")


def state_of(page):
    return parse_query(page.url.partition("?")[2].partition("#")[0])


def library(state):
    """Returns what the library says of a state, without anything of the studio's."""
    names = ("batch", "remat", "accumulate", "loss_chunks", "offload", "microbatches", "optimizer")
    options = StepOptions(**{name: getattr(state, name) or None for name in names})
    loaded = load_target(TARGET) if ":" in state.target else None
    found = load_step(state.target, options, devices=state.devices, loaded=loaded)
    rules = [state.strategy] if state.strategy else []
    inputs = None if loaded is not None else (found.batch,)
    layout = sw.layout(found, sw.mesh(state.axes, on=state.on), rules, inputs=inputs)
    return found, layout


def shows_what_the_library_says(page):
    state = state_of(page)
    found, layout = library(state)
    estimate = sw.estimate(found, layout)
    memory = page.inner_text("#card-memory")
    assert (
        f"{show_bytes(estimate.peak_bytes)} of {show_bytes(estimate.capacity)}"
        in memory.replace("\n", " ")
    )
    assert ("Fits" if estimate.fits else "Does not fit") in memory and "modelled" in memory
    assert show_seconds(estimate.seconds) in page.inner_text("#card-time")
    page.click("#tab-Memory")
    held = sum(part.bytes for part in plan_of(found, layout).parts)
    assert re.search(rf"total\s+{re.escape(show_bytes(held))}", page.inner_text("#view"))


def choose(control, value):
    return lambda page: page.select_option(control, value)


def slide(axis, steps):
    def act(page):
        page.focus(f"#axis-{axis}")
        for _ in range(abs(steps)):
            page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")

    return act


def moved(page, act):
    """Does what leads to another state, whose link is then that of the page."""
    before = page.url
    act()
    page.wait_for_url(lambda url: url != before)


def test_each_control_changes_the_numbers_to_those_of_the_library(open_page):
    page = open_page()
    steps = [
        (choose("#set-strategy", "fsdp"), ("strategy", "fsdp")),
        (slide("model", 1), ("axes", "data=4,model=2")),
        (choose("#set-remat", "nothing_saveable"), ("remat", "nothing_saveable")),
        (
            lambda page: (page.fill("#set-batch", "64x64"), page.keyboard.press("Enter")),
            ("batch", "64x64"),
        ),
        (choose("#set-accumulate", "2"), ("accumulate", 2)),
        (choose("#set-loss-chunks", "4"), ("loss_chunks", 4)),
        (choose("#set-optimizer", "sgd"), ("optimizer", "sgd")),
        (choose("#set-how-many", "h100:2x8"), ("on", "h100:2x8")),
        (choose("#set-chips", "v5p"), ("on", "v5p:2x2x4")),
    ]
    for act, (name, value) in steps:
        moved(page, lambda act=act: act(page))
        # Each of these has what the controls before it changed, too.
        if name in ("axes", "accumulate", "on", "optimizer"):
            settled(page)
            shows_what_the_library_says(page)
        assert getattr(state_of(page), name) == value
    # Back to where it began, by the keyboard, and forward again.
    end = page.url
    for _ in steps:
        moved(page, lambda: page.keyboard.press("Control+z"))
    settled(page)
    assert state_of(page).query == "target=" + TARGET + "&on=h100:1x8&mesh=data=8"
    assert page.is_disabled("#undo")
    for _ in steps:
        moved(page, lambda: page.click("#redo"))
    settled(page)
    assert page.url == end


def test_of_many_quick_moves_the_last_is_on_the_screen(open_page):
    page = open_page("target=llama3-8b&on=h100:2x8&mesh=data=16&strategy=fsdp")
    page.focus("#axis-model")
    for number in range(20):
        page.keyboard.press("ArrowRight" if number % 4 < 2 else "ArrowLeft")
    page.focus("#axis-fsdp")
    page.keyboard.press("ArrowRight")
    assert page.query_selector("#figures .tag.stale")
    page.wait_for_url(re.compile("fsdp=2"))
    settled(page)
    assert not page.query_selector("#figures .tag.stale")
    assert state_of(page).axes == "data=8,fsdp=2"
    shows_what_the_library_says(page)


def test_a_rule_and_a_pinned_state(open_page):
    page = open_page(f"target={TARGET}&on=h100:1x8&mesh=data=4,model=2&strategy=fsdp")
    page.click("#pin")
    page.click("summary:has-text('Rules for single paths')")
    page.fill("[aria-label='Path pattern']", "embed")
    page.fill("[aria-label='Spec']", "P('model')")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("rule=embed"))
    settled(page)
    assert state_of(page).rules == (("embed", "P('model')"),)
    compared = page.inner_text("#view")
    assert re.search(r"rules\s+none\s+embed P\('model'\)", compared)
    assert "1 leaf with another spec" in compared and "embed" in compared
    # A rule that is none is refused, and the state stays.
    page.fill("[aria-label='Path pattern']", "embed")
    page.fill("[aria-label='Spec']", "open('x')")
    page.keyboard.press("Enter")
    page.wait_for_selector("#alert:not([hidden])")
    assert "is not a spec" in page.inner_text("#alert")


def test_it_is_readable_by_everybody(open_page):
    """Names for a screen reader, contrast in both themes, and a phone without sideways scrolling."""
    page = open_page(color_scheme="dark")
    names = """() => [...document.querySelectorAll("button, input, select, [role=img], [role=tab]")]
      .filter((e) => e.offsetParent && !(e.getAttribute("aria-label") || e.textContent.trim()
        || (e.labels && e.labels.length) || e.getAttribute("placeholder"))).map((e) => e.outerHTML)"""
    contrast = """() => {
      const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const paper = light(getComputedStyle(document.body).backgroundColor);
      return [...document.querySelectorAll(".card h3, .card p, .card .figure, .tag, .hint, label, .ticks span, .status, #tabs button")]
        .filter((e) => e.offsetParent).map((e) => { const ink = light(getComputedStyle(e).color);
          return [e.className + e.textContent.slice(0, 20), (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05)]; })
        .filter(([, ratio]) => ratio < 4.5); }"""
    assert page.evaluate(names) == [] and page.evaluate(contrast) == []
    page.emulate_media(color_scheme="light")
    assert page.evaluate(contrast) == []
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / "studio.png")
    page.set_viewport_size({"width": 390, "height": 844})
    for tab in ("Model", "Memory", "Time", "Collectives", "Findings", "Mesh", "Search", "Pinned"):
        page.click(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") == 390, tab
    page.screenshot(path=PICTURES / "studio_390.png", full_page=True)


# --- what takes long -------------------------------------------------------------------------------


def compiler_of(page):
    page.wait_for_selector("#task:has-text('the compiler runs as process')")
    return int(re.search(r"process (\d+)", page.inner_text("#task"))[1])


def test_a_compilation_can_be_killed_and_cancelled(open_page):
    # A step of its own, which no other test has compiled.
    page = open_page("target=llama3-8b&on=h100:2x8&mesh=data=16&strategy=fsdp&batch=48x2048")
    page.click("#compile")
    os.kill(compiler_of(page), signal.SIGKILL)
    page.wait_for_selector("#task.bad")
    assert "was killed by signal 9" in page.inner_text("#task")
    assert "modelled" in page.inner_text("#card-memory")
    page.click("#compile")
    pid = compiler_of(page)
    page.click("#cancel")
    page.wait_for_selector("#task:has-text('Cancelled')")
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.05)


def test_the_copied_command_says_the_same(open_page, address):
    page = open_page(
        f"target={TARGET}&on=h100:1x8&mesh=data=4,model=2&strategy=fsdp+tensor&batch=64x64"
        "&remat=nothing_saveable&optimizer=adafactor&accumulate=2&rule=embed=P('model')"
    )
    page.click("#compile")
    page.wait_for_selector("#task.good")
    text = page.inner_text("#command")
    command = text.replace("shardwise", f"{sys.executable} -m shardwise", 1)
    command = command.replace(" <<'RULES'", " --format json <<'RULES'")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    shown = page.inner_text("#card-memory").replace("\n", " ")
    assert (
        f"{show_bytes(said['memory']['peak'])} of {show_bytes(said['memory']['capacity'])}" in shown
    )
    assert "compiled" in shown
    assert show_seconds(said["time"]["seconds"]) in page.inner_text("#card-time")
    # And so does the program in Python.
    script = answer(address, "python", state=state_of(page).query)["text"]
    script += f"assert layout.bytes_per_device == {said['memory']['parameters']}, layout\n"
    script = script.replace(
        "print(sw.compile(recipe, layout))", "print(sw.estimate(recipe, layout).peak_bytes)"
    )
    done = forked.run([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    estimated = answer(address, "estimate", state=state_of(page).query)["estimate"]
    assert done.stdout.split()[-1] == str(estimated["peak_bytes"])


def test_llama_3_8b_on_16_h100s_from_nothing(open_page, tmp_path):
    page = open_page()
    page.select_option("#set-model", "llama3-8b")
    settled(page)
    page.select_option("#set-how-many", "h100:2x8")
    settled(page)
    page.click("#tab-Search")
    page.click("#search-start")
    page.wait_for_selector(".point[data-number='2']")  # while it runs
    assert page.query_selector("#search-stop")
    page.click("#search-stop")
    page.wait_for_selector("#search-start")
    assert "stopped early: interrupted" in page.inner_text("#view .status")
    best = re.split(r"\t", page.inner_text("#candidates tbody tr >> nth=0"))
    page.focus(".point[data-number='0']")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("remat=|mesh=fsdp"))
    settled(page)
    state = state_of(page)
    assert (state.target, state.axes, state.strategy) == (
        "llama3-8b",
        best[1].strip(),
        best[2].strip(),
    )
    assert best[3].strip() in page.inner_text("#card-time")
    shows_what_the_library_says(page)
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "layout.json")
    saved = sw.load_layout(tmp_path / "layout.json")
    assert [leaf.spec for leaf in saved.leaves] == [leaf.spec for leaf in library(state)[1].leaves]


def test_it_stops_when_no_page_is_open(tmp_path):
    command = [sys.executable, "-m", "shardwise", "studio", TARGET, "--no-open", "--idle", "0.05"]
    done = forked.run(command, timeout=120)
    assert done.returncode == 0 and "stopped: no page was open for 0.05 minutes" in done.stderr


@pytest.mark.parametrize(
    "options, why",
    [
        (["nothing"], "is not a published shape"),
        ([TARGET, "--on", "cpu:8"], "a studio moves between chips"),
        ([TARGET, "--on", "h100:1x9"], "a host of h100 has at most 8"),
        ([TARGET, "--strategy", "best"], "use Search"),
        ([TARGET, "--mesh", "data=4"], "has 4 devices, but h100:1x8 has 8"),
        (["shardwise.examples.text:make", "--optimizer", "sgd"], "--optimizer needs a recipe"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(run, options, why):
    status, out, err = run("studio", "--no-open", *options)
    assert (status, out) == (2, "") and why in err and err.count("\n") == 1


def test_without_its_libraries_it_says_what_to_install():
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "import shardwise as sw; from flax import nnx\n"
        "make = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))\n"
        "sw.layout(make, sw.mesh('data=2', on='none')).studio(make)"
    )
    done = forked.run([sys.executable, "-c", code])
    assert 'uvicorn, which is not installed: pip install "shardwise[studio]"' in done.stderr
