"""Use of a CUDA device beyond kernels: overlapped steps, graphs, concurrent copies, and sharing of memory."""
