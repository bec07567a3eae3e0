"""How workers are chosen: one small class for each policy behind one interface."""
