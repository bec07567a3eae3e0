"""The device executor, on a CPU where there is no GPU."""
