"""Paged attention: the packed-batch metadata and the implementations that read a block table."""
