"""Adapters to packages that run models; each imports its package when it is imported itself."""
