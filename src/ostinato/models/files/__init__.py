"""Model files: GGUF and safetensors, read as a stranger's; where known models are kept."""
