"""The ways in which KV blocks travel from one worker's pages to another's."""
