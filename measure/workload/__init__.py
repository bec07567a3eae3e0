"""What is asked, and when: traces, sessions, lengths and arrivals. Nothing here knows who answers."""
