"""Workloads: what is asked of an engine, and when. Built in, or read from a file."""
