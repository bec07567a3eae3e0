"""vLLM's model runner below the seam: our scheduler, pages, handoffs and sampler above its kernels and its ranks."""
