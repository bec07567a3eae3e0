"""vLLM's own engine under our services, and our transfers between its pages."""
