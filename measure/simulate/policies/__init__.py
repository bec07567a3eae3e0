"""Policies for replays alone: those of other systems, one small class each, and one with perfect signals."""
