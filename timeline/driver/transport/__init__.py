"""How a client reaches a broker: addresses, channels, gRPC."""
