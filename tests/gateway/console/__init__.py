"""The console: what its pages say, who may do what, and how it looks and behaves in a browser."""
