"""The decoder's operations as Triton kernels, tuned for Hopper."""
