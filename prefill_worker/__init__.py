"""Computes prompts and serves their KV."""
