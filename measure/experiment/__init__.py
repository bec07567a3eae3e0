"""Experiments: one workload on many pool shapes, real and simulated."""
