"""vLLM's own engine with our transfers, through its public interface of KV connectors: what needs no connection."""
