"""A browser, and pages opened in it."""

import browser as browsers
import pytest


@pytest.fixture(scope="module")
def browser():
    with browsers.chromium() as found:
        yield found


@pytest.fixture
def open_page(browser, tmp_path):
    """Returns a function that opens a report; the browser's complaints fail the test."""

    def opened(report, **how):
        file = tmp_path / "report.html"
        report.save(file)
        return browsers.opened(browser, file, **how)

    return opened
