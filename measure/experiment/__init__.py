"""Scaling experiments: one workload on many pool shapes, real and simulated, and what follows for the next worker."""
