"""Suites: lists of cases, in Python."""
