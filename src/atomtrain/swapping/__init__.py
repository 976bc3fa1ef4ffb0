"""Streams, slots, host store, executor and host optimizer: the swap engine."""
