"""Pages that are looked at: self-contained HTML with interactive plots."""
