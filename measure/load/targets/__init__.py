"""Servers that can be put under load, behind one interface."""
