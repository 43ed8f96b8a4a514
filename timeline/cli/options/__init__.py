"""Options and values that people write on the command line."""
