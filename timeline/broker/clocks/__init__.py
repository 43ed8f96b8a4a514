"""Clocks: the broker's own held against its peers', the store's and its clients'."""
