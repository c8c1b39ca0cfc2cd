"""Regression: verdicts from history, from exact figures, from pairs."""
