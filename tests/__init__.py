"""Timeline's tests; the folders mirror the package's."""
