"""Requests and their times: traces, sessions, lengths and arrivals, independent of the server."""
