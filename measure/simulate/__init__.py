"""The real router and workers under a virtual clock: forward passes, copies and the network alone are models."""
