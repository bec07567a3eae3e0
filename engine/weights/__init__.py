"""A model's configuration and weights: dtypes, quantization, rotations, what a checkpoint is read into."""
