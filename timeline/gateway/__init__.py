"""The gateway: Timeline over HTTP, for any language. It is a stateless process over the driver."""
