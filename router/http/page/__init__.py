"""The live page of the cluster at `/`: static files that need no build step, and the events that fill them."""
