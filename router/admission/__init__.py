"""Who gets a plan, and when: limits, a fair and bounded line, refusals that say why and when to retry."""
