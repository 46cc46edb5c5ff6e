"""The one language between the engine and whoever watches it: events, their fold, invariants, recordings."""
