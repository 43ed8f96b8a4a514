"""The broker's only I/O: gRPC, TLS, tokens, health, the metrics port, processes and signals."""
