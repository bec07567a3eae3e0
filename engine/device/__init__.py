"""Memory and copies of the device that an engine runs on, CPU or CUDA."""
