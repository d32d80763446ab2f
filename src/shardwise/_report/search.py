"""What a search found as one page: time against memory, with the table beside it."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from .._search import Candidate, Found
from .report import Report, page_of

_STYLES = ("page.css", "search.css")
_SCRIPTS = ("data.js", "lists.js", "theme.js", "front.js", "search.js")


def report_of_search(found: Found) -> Report:
    """Returns the page of what a search found."""
    shown = found.candidates or found.remedies
    chips = list(dict.fromkeys(candidate.chips for candidate in shown))
    title = f"Layouts on {', '.join(chips)}" if chips else "Layouts"
    fitting = any(candidate.fits for candidate in found.candidates)
    data = {
        "title": title,
        "version": metadata.version("shardwise"),
        **found.to_dict(),
        "verdict": _verdict(found),
        "candidates": [candidate_row(c, found if fitting else None) for c in found.candidates],
        "remedies": [candidate_row(c) for c in found.remedies],
    }
    return page_of("search.html", title, data, _STYLES, _SCRIPTS)


def _verdict(found: Found) -> dict[str, str]:
    if any(candidate.fits for candidate in found.candidates):
        if not found.best.sure:
            return {"state": "plain", "text": f"the fastest that may fit: {found.best}"}
        return {"state": "good", "text": f"the fastest that fits: {found.best}"}
    try:
        text = str(found.best)
    except ValueError as error:  # which says that nothing fits, and what comes nearest
        text = str(error).removesuffix("; what would fit:")
    return {"state": "bad", "text": text}


def candidate_row(candidate: Candidate, found: Found | None = None) -> dict[str, Any]:
    """Returns what a page shows of one candidate; of those that were found, also why it is behind."""
    estimate = candidate.estimate
    why = ""
    if found is not None and found.best is not candidate:
        why = found.explain(found.best, candidate)
    return {
        **candidate.to_dict(),
        "axes": candidate.mesh,
        "parts": dict(candidate.parts),
        "state_bytes": estimate.state_bytes,
        "sent": {
            axes: sum(sent for _, sent in kinds.values())
            for axes, kinds in estimate.by_axis.items()
        },
        "tokens_per_second": estimate.tokens / candidate.seconds if estimate.tokens else None,
        "why": why,
    }
