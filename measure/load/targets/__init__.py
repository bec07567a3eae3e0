"""Servers under load, behind one interface."""
