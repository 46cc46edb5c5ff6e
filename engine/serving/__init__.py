"""The OpenAI-form HTTP listener over a `PagedEngine`."""
