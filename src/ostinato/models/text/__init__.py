"""Tokenizers and chat templates; untrusted ones run in processes with limits."""
