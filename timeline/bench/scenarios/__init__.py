"""The scenarios: how fast, how late, what holding costs, and several brokers together."""
