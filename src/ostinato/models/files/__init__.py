"""Model files: GGUF and safetensors, which are not trusted; where known models are kept."""
