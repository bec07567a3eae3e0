"""The decoder's operations as Triton kernels, tuned for Hopper: one file per kernel, `reference` beside them all."""
