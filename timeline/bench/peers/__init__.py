"""What stands beside Timeline in a measurement: other services, the bare store, bare gRPC."""
