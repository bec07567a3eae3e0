"""The gRPC door, and the path of a request that all doors share."""
