"""Commands that look at running brokers."""
