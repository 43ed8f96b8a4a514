"""The broker's only I/O: gRPC with TLS and tokens, health, the metrics port, processes and signals."""
