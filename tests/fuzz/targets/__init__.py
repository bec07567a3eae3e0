"""Fuzz targets, one file per door."""
