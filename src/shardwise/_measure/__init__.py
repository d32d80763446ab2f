"""Measures the devices of this machine, to price steps with."""

from .measuring import measure as measure
