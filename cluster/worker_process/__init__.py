"""A worker process: in one role at a time, able to serve in either."""
