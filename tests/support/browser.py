"""A real browser for the tests of pages."""

import contextlib
import os
import shutil

import pytest
from playwright.sync_api import Error, sync_playwright

HELP = "install one: apt-get install chromium, or playwright install chromium"


@contextlib.contextmanager
def chromium():
    """Yields a headless Chromium: $CHROMIUM, the system's, or Playwright's own.

    Without one the test is skipped, and the summary says so; with SHARDWISE_TESTS_BROWSER=required,
    as in CI, it fails.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as play:
        try:
            # Its sandbox needs rights that a container does not have.
            browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as error:
            told = f"no Chromium can be started; {HELP}"
            if os.environ.get("SHARDWISE_TESTS_BROWSER") == "required":
                pytest.fail(f"{told}\n{error}")
            pytest.skip(told)
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser, file, **how):
    """Yields a page of a file, and raises if it complained, or asked for anything else."""
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **how})
    told, asked = [], []
    page.on("console", lambda one: told.append(one.text) if one.type != "log" else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda one: asked.append(one.url))
    page.set_default_timeout(20_000)
    page.goto(file.as_uri())
    try:
        yield page
        assert told == [], told
        assert asked == [file.as_uri()], asked
    finally:
        page.close()
