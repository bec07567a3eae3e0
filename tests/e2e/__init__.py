"""Real processes, real sockets."""
