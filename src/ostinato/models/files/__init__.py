"""Readers of untrusted model files (GGUF, safetensors), and the store of known models."""
