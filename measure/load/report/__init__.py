"""Pages of load tests: one run (`page`), or several compared (`comparison`)."""
