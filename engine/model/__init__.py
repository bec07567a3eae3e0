"""A lean decoder for Llama-shaped checkpoints: config, rotary embedding, weights, forward pass."""
