"""Measurements, each runnable as a module: `python -m engine.bench.NAME`."""
