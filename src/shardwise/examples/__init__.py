"""Models that ship with the package, to try its commands with."""
