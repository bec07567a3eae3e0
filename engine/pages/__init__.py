"""Pages of keys and values: their bytes and formats, who holds them, what the prefix cache keeps."""
