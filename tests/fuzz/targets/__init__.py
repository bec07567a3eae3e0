"""What is fuzzed, door by door."""
