"""Measurements with their method."""
