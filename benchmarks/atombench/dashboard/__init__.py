"""Benchmark `dashboard`: how quick and clean the page is with long runs and many peers."""
