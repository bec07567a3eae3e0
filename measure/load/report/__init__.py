"""Load tests as pages: one run (`page`), or several over each other (`comparison`)."""
