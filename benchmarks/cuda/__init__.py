"""What one GPU shows: `benchmarks/cuda_all.sh` runs every part; each runs by itself and, with --smoke, on a CPU."""
