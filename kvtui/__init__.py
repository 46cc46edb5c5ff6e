"""kvtui: a live terminal dashboard for the paged KV cache of an LLM engine."""

__version__ = "0.1.0"
