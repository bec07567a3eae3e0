"""KV that outlives its page: verified blocks in host memory and on disk."""
