"""Findings: what is wrong with a layout, or with arrays that should follow it."""

from .findings import CODES as CODES
from .findings import Allow as Allow
from .findings import Finding as Finding
from .findings import Findings as Findings
from .findings import LayoutError as LayoutError
from .findings import group_similar as group_similar
from .findings import make_finding as make_finding
from .findings import nearest_codes as nearest_codes
from .findings import sift as sift
from .live import audit as audit
from .matching import matched as matched
from .matching import require_match as require_match
from .planned import check as check
