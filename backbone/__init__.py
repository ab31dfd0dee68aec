"""The backbone process: dense path, router, KV cache, dispatch, tokenizer, sampling, commands."""
