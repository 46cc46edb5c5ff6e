"""Layouts and overlays."""
