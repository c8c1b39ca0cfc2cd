"""Instruments: time, memory, communication."""
