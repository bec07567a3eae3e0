"""What an engine needs of a CUDA device beyond kernels: overlapped steps, graphs, copies beside the steps, sharing."""
