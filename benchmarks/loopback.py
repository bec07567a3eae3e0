"""HTTP to servers on this host, to which no proxy of the environment leads."""

import urllib.request

open_here = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""`urllib.request.urlopen` for loopback."""
