"""Readers of checkpoints: safetensors, plain or quantized (compressed-tensors, GPTQ, AWQ), and GGUF."""
