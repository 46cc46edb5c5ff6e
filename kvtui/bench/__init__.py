"""Measurements of the dashboard: ratios in one run on one machine."""
