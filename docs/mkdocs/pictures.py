"""Takes the pictures of the report that the README and the docs show, in a real browser.

    python docs/mkdocs/pictures.py

It compiles Llama 3 8B for 16 H100s (a minute; it is kept), and needs a Chromium.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import browser as browsers  # noqa: E402

COMMAND = (
    "report llama3-8b --on h100:2x8 --mesh data=4,model=4 --strategy fsdp+tensor "
    "--batch 16x4096 --compile -o"
)


WIDTH = 1400


def main() -> None:
    """Writes the pictures to docs/assets."""
    with tempfile.TemporaryDirectory() as folder, browsers.chromium() as browser:
        file = Path(folder) / "report.html"
        shardwise = [sys.executable, "-m", "shardwise"]
        # From elsewhere, so that lines of the package read as they do for its users.
        subprocess.run([*shardwise, *COMMAND.split(), str(file)], check=True, cwd=folder)
        how = {"viewport": {"width": WIDTH, "height": 900}, "color_scheme": "light"}
        with browsers.opened(browser, file, **how) as page:
            page.click("text=Open all")
            page.click('.tree .row[data-path="blocks.0.attention.out"]')
            shown = (
                ("report", "top", "summary"),
                ("time", "time", "time"),
                ("model", "model", "leaf"),
            )
            for name, first, last in shown:
                page.screenshot(
                    path=ROOT / "docs" / "assets" / f"{name}.png",
                    full_page=True,
                    clip=_around(page, first, last),
                )


def _around(page, first, last):
    """Returns the rectangle from one part of the page to another."""
    page.evaluate("scrollTo(0, 0)")
    top = page.locator(f"#{first}").bounding_box()["y"] if first != "top" else 0
    end = page.locator(f"#{last}").bounding_box()
    left = 0 if first == "top" else page.locator(f"#{first}").bounding_box()["x"] - 16
    return {
        "x": left,
        "y": top,
        "width": WIDTH - left,
        "height": end["y"] + end["height"] - top + 8,
    }


if __name__ == "__main__":
    main()
