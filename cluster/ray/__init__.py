"""Everything that imports Ray: launchers, the controller, the node provider."""
