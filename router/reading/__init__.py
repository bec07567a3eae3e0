"""What turns a request into tokens, and tokens into text: checks, templates, tokenizers."""
