"""The `kvrelay` command. Torch, transformers and Ray are imported only by the commands that compute or launch."""
