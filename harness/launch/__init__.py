"""Launchers: how the ranks of a case are started, watched and ended."""
