"""Data sets on disk: layouts, checks, pages, and configs for them."""
