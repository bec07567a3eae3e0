"""C++ kernels for the CPU, compiled for this very processor on first use; without a compiler, torch does the work."""
