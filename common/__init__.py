"""Vocabulary that two or more packages share. No torch, no Ray."""
