"""The worker process: holds experts, answers calls. Keeps no session, no router, no KV cache."""
