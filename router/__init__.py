"""The front door: tokenizes, places, orchestrates, streams."""
