"""How many workers each pool should have: pure decisions from what was observed, the same in service and simulation."""
