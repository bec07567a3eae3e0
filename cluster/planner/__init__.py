"""Decides the pools' sizes from observations. Pure; the same in service and in simulation."""
