"""Other projects' clients, unchanged, in front of clusters of processes, and what agents sent, recorded.

`make foreign` installs and runs the clients.
"""
