"""The command line. A module per command, or per few that belong together; shared are `app` (the root, errors, exit
codes), `options` (what people write) and `output` (tables, JSON, progress)."""
