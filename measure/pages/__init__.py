"""Reports: self-contained HTML pages with interactive plots."""
