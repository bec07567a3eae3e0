"""How workers are chosen: our own policy and the published ones, one small class each behind one interface."""
