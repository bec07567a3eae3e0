"""Admission: limits, a fair and bounded line, refusals that say why and when to retry."""
