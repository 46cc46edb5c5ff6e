"""Drives a live session over HTTP, and measures what a caller sees."""
