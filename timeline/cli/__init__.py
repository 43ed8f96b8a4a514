"""The command line. One file a command group; what they share is in `app` (the root, errors, exit codes), `values`
(what people write) and `output` (tables for people, JSON for machines)."""
