"""One model on one device: block pool, KV cache, model, attention, sampler, step loop."""
