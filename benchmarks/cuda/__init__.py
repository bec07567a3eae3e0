"""Measurements on one GPU: `benchmarks/cuda_all.sh` runs every part; each runs by itself too, with --smoke on a CPU."""
