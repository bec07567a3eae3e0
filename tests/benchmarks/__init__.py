"""Tests of the measurements: that they run, and that what they divide by is right."""
