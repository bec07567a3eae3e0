"""A worker process, which serves in one role at a time and can change it."""
