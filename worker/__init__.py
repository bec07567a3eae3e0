"""What both worker kinds share: engine start-up, status, KV events, text output, process shell."""
