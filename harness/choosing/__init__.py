"""Choosing a strategy: what was measured, or else foreseen, ranked for the devices that somebody has."""
