"""The router: tokenizes, places, orchestrates and streams requests."""
