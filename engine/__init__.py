"""A paged-KV-cache LLM engine that tells, step by step, what it did.

Importing this package imports no torch: the policy (`engine.core`) and the trace (`engine.trace`) are plain Python.
"""
