"""Runs, measures, judges and records distributed training; knows no implementation by name."""
