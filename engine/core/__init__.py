"""The policy: block pool, KV cache manager and scheduler, in plain Python."""
