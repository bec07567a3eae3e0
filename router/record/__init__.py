"""What a router keeps of a request while it runs, and of its tenant."""
