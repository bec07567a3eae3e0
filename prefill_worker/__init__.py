"""Reads prompts and serves their KV."""
