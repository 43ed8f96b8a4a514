"""The event journal and the process that writes it."""
