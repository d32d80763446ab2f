"""Helpers for walking jaxprs, and the one place for APIs of JAX that may move."""

from .jaxpr import call_jaxpr as call_jaxpr
from .jaxpr import cut_jaxpr as cut_jaxpr
from .jaxpr import is_jaxpr as is_jaxpr
from .jaxpr import is_literal as is_literal
from .jaxpr import opened as opened
from .jaxpr import scan_parts as scan_parts
from .jaxpr import sub_jaxprs as sub_jaxprs
from .jaxpr import user_line as user_line
from .quick import quick_tracing as quick_tracing
from .values import shorten as shorten
from .values import show_value as show_value
