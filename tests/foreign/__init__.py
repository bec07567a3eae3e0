"""Other projects' clients, unchanged, in front of clusters of processes. `make foreign` installs and runs them."""
